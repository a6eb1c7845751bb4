"""Caches of one attention application: a fixed set of streams that grow together."""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from caramba.cache.tensor import TAIL_TOKENS, KVCacheTensor, KVCacheTensorConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind, Streams, kind_of_stream
from caramba.config.layer import AttentionDims
from caramba.errors import ConfigError
from caramba.ops.dba_decode import StoredStream

FOUR_BIT = (KVCacheKind.Q4_0, KVCacheKind.NF4)
ROTATED = ("k", "k_sem", "k_geo", "c")


class LayerCache:
    """Streams of one attention application, by name; all hold the same number of tokens."""

    names: tuple[str, ...] = ()
    """Of the streams, by class; of an instance where streams are those of a layer."""
    keeps_first_tokens: ClassVar[bool] = False
    cuts_anywhere: ClassVar[bool] = True
    """Whether a prefix of its content is the content after that prefix."""
    is_for_host: ClassVar[bool] = False
    """Whether its layer reads and writes it by itself, so that no step on the device can."""

    def __init__(
        self,
        streams: Streams,
        *,
        batch_size: int,
        max_tokens: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        device: torch.device | str = "cpu",
        static: bool = False,
        tail_tokens: int = TAIL_TOKENS,
        hadamard: bool = False,
    ) -> None:
        got = tuple(name for name, _, _ in streams)
        if got != self.names:
            raise ConfigError(f"{type(self).__name__}: got streams {got}, expected {self.names}; use new_layer_cache()")
        self.streams, self.kind, self._names = streams, kind, set(self.names)
        self._tensors = {
            name: KVCacheTensor(
                _format(kind, name, tail_tokens, hadamard),
                batch_size=batch_size,
                n_heads=n_heads,
                width=width,
                max_tokens=max_tokens,
                device=device,
                static=static,
            )
            for name, n_heads, width in self._stored()
        }

    _first: Mapping[str, KVCacheTensor] = MappingProxyType({})
    """First tokens that are kept at full precision besides."""

    def _every(self) -> list[tuple[str, KVCacheTensor]]:
        return [*self._tensors.items(), *self._first.items()]

    def _stored(self) -> Streams:
        return self.streams

    @property
    def n_tokens(self) -> int:
        """Tokens stored per sequence. Inside a forward, those of the streams appended so far."""
        return min([tensor.n_tokens for tensor in self._tensors.values()])

    @property
    def ring_size(self) -> int | None:
        """Places of a ring of the last tokens, token t at t % ring_size; None where all are stored.

        Steps on the device then need all sequences at one position.
        """
        return None

    @property
    def n_dropped(self) -> int:
        """Tokens seen that are no longer stored as such."""
        return 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the allocated buffers."""
        return sum(tensor.allocated_bytes for _, tensor in self._every())

    @property
    def used_bytes(self) -> int:
        """Bytes of the stored tokens."""
        return sum(tensor.used_bytes for _, tensor in self._every())

    @property
    def tail_bytes(self) -> int:
        """Bytes, of those used, of the tokens that quantised streams still have in 16 bits."""
        return sum(tensor.tail_bytes for tensor in self._tensors.values())

    @property
    def first_bytes(self) -> int:
        """Bytes, of those used, of first tokens that are kept at full precision besides."""
        return sum(tensor.used_bytes for tensor in self._first.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes for good, all streams together."""
        return sum(tensor.bytes_per_token for tensor in self._tensors.values())

    @property
    def tensors(self) -> Mapping[str, KVCacheTensor]:
        """Allocated tensors by name: one per stream, or one for several concatenated streams."""
        return self._tensors

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return all tokens stored, [B, K, S, D] per stream.

        Exact formats are views in the storage dtype; quantised ones come in `dtype`, without one in float32.
        """
        return {name: tensor.read(None if tensor.is_exact else dtype) for name, tensor in self._tensors.items()}

    def append(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store the next tokens of every stream and return all tokens stored, the new ones included.

        Shape: in [B, K, T, D] per stream, out [B, K, S, D] with S = tokens before + T, in the storage dtype, of
        quantised streams in the dtype that came in.
        """
        self.write(streams)
        return self.read(streams[self.names[0]].dtype)

    def write(self, streams: Mapping[str, Tensor]) -> None:
        """Store the next tokens of every stream, [B, K, T, D] each, and read none.

        Raises:
            CacheFull: more tokens than fit; the cache is unchanged.
            ConfigError: streams of another layer, or that autograd follows; the cache is unchanged.
        """
        self.check_streams(streams)
        self._store(streams)

    def check_streams(self, streams: Mapping[str, Tensor]) -> None:
        """Refuse streams of another layer, of another batch, or of unlike numbers of tokens.

        Raises:
            ConfigError: naming the stream.
        """
        if streams.keys() != self._names:
            raise ConfigError(
                f"{type(self).__name__}: got streams {sorted(streams)}, expected {sorted(self.names)}; "
                "make the context with this model's new_context()"
            )
        batch_size, first = self.batch_size, streams[self.names[0]].shape
        n_tokens = first[2] if len(first) == 4 else "T"
        for name, n_heads, width in self.streams:
            if streams[name].shape != (batch_size, n_heads, n_tokens, width):
                raise ConfigError(
                    f"{type(self).__name__}: got {name} of shape {tuple(streams[name].shape)}, expected [{batch_size}, "
                    f"{n_heads}, {n_tokens}, {width}], as many tokens of every stream; make the context with this "
                    "model's new_context() and the same batch size"
                )

    @property
    def allocations(self) -> list[Tensor]:
        """The buffers [B, K, S, W] that new tokens are written to, in the order of `names`.

        For an exact format they store all tokens, for a quantised one the 16-bit tail.
        """
        return [tensor.storage().tensors[-1] for tensor in self._tensors.values()]

    def storage(self) -> dict[str, StoredStream]:
        """Return every stream's whole allocation without a copy; `n_tokens` and `n_packed` bound the valid part."""
        return {name: tensor.storage() for name, tensor in self._tensors.items()}

    @property
    def n_packed(self) -> int | None:
        """Tokens stored as quantised blocks, the same for all streams; None if no stream is quantised."""
        return next((tensor.n_packed for tensor in self._tensors.values() if tensor.n_packed is not None), None)

    @property
    def is_rotated(self) -> bool:
        """Whether a stream's blocks are Hadamard-rotated, while its 16-bit tail is not."""
        return any(tensor.config.hadamard for tensor in self._tensors.values())

    @property
    def batch_size(self) -> int:
        """Sequences that the cache holds."""
        return next(iter(self._tensors.values())).batch_size

    def _store(self, streams: Mapping[str, Tensor]) -> None:
        # Check all streams before storing one: streams of different lengths would misalign keys and values.
        for name, tensor in self._tensors.items():
            tensor.check_append(streams[name])
        for name, tensor in self._tensors.items():
            tensor.put(streams[name])

    def pack(self, n_tokens: int) -> bool:
        """Quantise what an append to `n_tokens` tokens quantises first, and return whether there was any."""
        packed = [tensor.pack(n_tokens) for tensor in self._tensors.values()]
        return any(packed)

    def advance(self, n_tokens: int) -> None:
        """Count `n_tokens` more in every stream: a kernel writes them into `allocations` itself."""
        for tensor in self._tensors.values():
            tensor.advance(n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Forget every token from `n_tokens` on, in every stream."""
        for tensor in self._tensors.values():
            tensor.truncate(n_tokens)

    def extend(self, max_tokens: int) -> None:
        """Allow up to `max_tokens` tokens in every stream, if that is more than before."""
        for tensor in self._tensors.values():
            tensor.extend(max_tokens)

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, [B'] integers, in that order, in every stream."""
        for _, tensor in self._every():
            tensor.select(rows)

    def row(self, index: int, n_rows: int = 1) -> Self:
        """Return the cache of one sequence, or of `n_rows`: it counts its own tokens, in this one's memory."""
        alone = copy.copy(self)
        alone._tensors = {name: tensor.row(index, n_rows) for name, tensor in self._tensors.items()}
        alone._first = {name: tensor.row(index, n_rows) for name, tensor in self._first.items()}
        return alone

    @property
    def memory(self) -> list[Tensor]:
        """All that is allocated, in use or not."""
        return [part for _, tensor in self._every() for part in tensor.memory]

    def clone(self) -> Self:
        """Return a copy that shares no memory."""
        copied = copy.copy(self)
        copied._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        copied._first = {name: tensor.clone() for name, tensor in self._first.items()}
        return copied

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what is stored, by `stream.buffer`."""
        return {
            f"{name}.{part}": values for name, tensor in self._every() for part, values in tensor.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the content of another cache of the same streams, format and batch.

        Raises:
            ConfigError: what is there is not that of these streams; the cache is unchanged.
            CacheFull: more tokens than fit; the cache is unchanged.
        """
        parts = self._parts_of(state)
        for name, tensor in self._tensors.items():
            tensor.load_state_dict(parts[name])

    def tokens_of(self, state: Mapping[str, Tensor]) -> int:
        """Return how many tokens `load_state_dict` would take out of a state.

        Raises:
            ConfigError, CacheFull: as there.
        """
        parts = self._parts_of(state)
        return next(tensor.check_state(parts[name])[0] for name, tensor in self._tensors.items())

    def _parts_of(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return a state by stream and buffer, once all of it is known to fit together, and here."""
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in self._tensors}
        for key, values in state.items():
            name, _, part = key.partition(".")
            if name not in parts:
                raise ConfigError(
                    f"{type(self).__name__}: the state has a stream {name!r}, expected {sorted(parts)}; "
                    "load it into a cache of the model that it was saved from"
                )
            parts[name][part] = values
        counts = {name: tensor.check_state(parts[name]) for name, tensor in self._tensors.items()}
        # One number of blocks serves a decode step, whichever stream it reads.
        blocks = {counts[name][1] for name, tensor in self._tensors.items() if not tensor.is_exact}
        if len({n_tokens for n_tokens, _ in counts.values()}) > 1 or len(blocks) > 1:
            told = [f"{name} {n_tokens} ({packed} in blocks)" for name, (n_tokens, packed) in counts.items()]
            raise ConfigError(
                f"{type(self).__name__}: the state's streams hold {', '.join(told)} tokens, expected as many each; "
                "the state is damaged, make it again"
            )
        return parts


class LayerKVCache(LayerCache):
    """Keys (after RoPE) and values of standard, grouped-query and bottleneck attention."""

    names = ("k", "v")


class DecoupledLayerKVCache(LayerCache):
    """Semantic keys, geometric keys (after RoPE) and values of decoupled attention, per key/value head."""

    names = ("k_sem", "k_geo", "v")


class LatentLayerKVCache(LayerCache):
    """The latent that all heads read as semantic key and value, and the geometric key (after RoPE).

    An exact format concatenates both in one tensor, because absorbed attention reads them as one key: `read`
    returns that as `joined` [B, 1, S, R + Dgeo], without a copy. Quantised formats may differ between the two.
    """

    names = ("c", "k_geo")

    def _stored(self) -> Streams:
        if self.kind not in EXACT_KINDS:
            return self.streams
        return (("joined", 1, sum(width for _, _, width in self.streams)),)

    def _store(self, streams: Mapping[str, Tensor]) -> None:
        if "joined" in self._tensors:
            streams = {"joined": torch.cat([streams[name] for name in self.names], dim=-1)}
        super()._store(streams)

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        stored = super().read(dtype)
        if "joined" not in stored:
            return stored
        c, k_geo = stored["joined"].split([width for _, _, width in self.streams], dim=-1)
        return {"c": c, "k_geo": k_geo, **stored}

    def storage(self) -> dict[str, StoredStream]:
        stored = super().storage()
        if "joined" not in stored:
            return stored
        kind, values = stored["joined"].kind, stored["joined"].values
        parts = values.split([width for _, _, width in self.streams], dim=-1)
        return {name: StoredStream(kind, part) for name, part in zip(self.names, parts, strict=True)}


class FirstTokensKVCache(LatentLayerKVCache):
    """Latent cache that also stores `k_first` (after RoPE) and `v_first` of the first n tokens.

    Both are stored in the cache's dtype, in bfloat16 if that is quantised. Their size is constant per sequence:
    `bytes_per_token` excludes them, `first_bytes` reports them, `used_bytes` and `allocated_bytes` include them.
    """

    keeps_first_tokens = True

    def __init__(self, dims: AttentionDims, *, max_tokens: int, static: bool = False, **format: Any) -> None:
        super().__init__(dims.streams, max_tokens=max_tokens, static=static, **format)
        self.first_tokens = dims.first_tokens
        exact = self.kind if self.kind in EXACT_KINDS else KVCacheKind.BF16
        self._first = {
            name: KVCacheTensor(
                KVCacheTensorConfig(exact),
                batch_size=self.batch_size,
                n_heads=n_heads,
                width=width,
                max_tokens=min(dims.first_tokens, max_tokens),
                device=format.get("device", "cpu"),
                static=static,
            )
            for name, n_heads, width in dims.first_streams
        }

    def append(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `LayerCache.append`; `k_first` and `v_first` hold the new tokens among the first n, or none."""
        missing = sorted(set(self._first) - set(streams))
        if missing:
            raise ConfigError(
                f"{type(self).__name__}: got streams {sorted(streams)}, without {', '.join(missing)}; "
                "make the context with this model's new_context()"
            )
        others = {name: values for name, values in streams.items() if name not in self._first}
        before = self.n_tokens
        expected = self._kept(before + streams[self.names[0]].shape[2]) - self._kept(before)
        for name in self._first:
            if streams[name].shape[2] != expected:
                raise ConfigError(
                    f"{type(self).__name__}: got {streams[name].shape[2]} tokens of {name} after {before} tokens, "
                    f"expected {expected} (the first {self.first_tokens} of a sequence are kept)"
                )
        for name, tensor in self._first.items():  # before anything is stored
            tensor.check_append(streams[name])
        stored = super().append(others)
        for name, tensor in self._first.items():
            tensor.put(streams[name])
        return stored | {name: tensor.read() for name, tensor in self._first.items()}

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return super().read(dtype) | {name: tensor.read() for name, tensor in self._first.items()}

    def truncate(self, n_tokens: int) -> None:
        super().truncate(n_tokens)
        for tensor in self._first.values():
            tensor.truncate(min(n_tokens, tensor.n_tokens))

    def extend(self, max_tokens: int) -> None:
        super().extend(max_tokens)
        for tensor in self._first.values():
            tensor.extend(self._kept(max_tokens))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in self._first}
        others: dict[str, Tensor] = {}
        for key, values in state.items():
            name, _, part = key.partition(".")
            if name in parts:
                parts[name][part] = values
            else:
                others[key] = values
        held = {name: tensor.check_state(parts[name])[0] for name, tensor in self._first.items()}
        n_tokens = self.tokens_of(others)
        for name, count in held.items():
            if count != self._kept(n_tokens):
                raise ConfigError(
                    f"{type(self).__name__}: the state has {count} tokens of {name} and {n_tokens} of the others, "
                    f"expected {self._kept(n_tokens)}; load it into a cache of the model that it was saved from"
                )
        super().load_state_dict(others)
        for name, tensor in self._first.items():
            tensor.load_state_dict(parts[name])

    def _kept(self, n_tokens: int) -> int:
        return min(n_tokens, self.first_tokens)


def new_layer_cache(
    dims: AttentionDims,
    batch_size: int,
    max_tokens: int,
    kind: KVCacheKind = KVCacheKind.FP32,
    device: torch.device | str = "cpu",
    static: bool = False,
    *,
    tail_tokens: int = TAIL_TOKENS,
    hadamard: bool = False,
) -> LayerCache:
    """Return an empty cache for the streams that an attention layer of these widths stores.

    `hadamard` rotates what 4-bit streams of keys and latents store; values and other formats stay as they are.

    Raises:
        ConfigError: no cache class holds these streams, or the kind is `auto`, which nobody has chosen yet.
    """
    format = {"tail_tokens": tail_tokens, "hadamard": hadamard}
    given: dict[str, Any] = {"kind": kind, "device": device, "static": static, **format}
    if dims.first_tokens:
        return FirstTokensKVCache(dims, batch_size=batch_size, max_tokens=max_tokens, **given)
    names = tuple(name for name, _, _ in dims.streams)
    for cls in (LayerKVCache, DecoupledLayerKVCache, LatentLayerKVCache):
        if cls.names == names:
            return cls(dims.streams, batch_size=batch_size, max_tokens=max_tokens, **given)
    raise ConfigError(f"KV cache: no cache holds the streams {names}; use the dims of an attention layer's config")


def _format(kind: KVCacheKind, stream: str, tail_tokens: int, hadamard: bool) -> KVCacheTensorConfig:
    own = kind_of_stream(kind, stream)
    return KVCacheTensorConfig(own, tail_tokens, hadamard and own in FOUR_BIT and stream in ROTATED)


class CustomLayerCache(LayerCache):
    """The streams that a layer's schema declares by `cached_streams`, [B, heads, S, width] each.

    The layer's forward calls `ctx.next_cache()` once, passes the new tokens of every stream to `append`, and receives
    all stored tokens, the new ones last. The cache itself handles rollback, row selection, quantised formats and
    saving.
    """

    is_for_host = True

    def __init__(self, streams: Streams, **options: Any) -> None:
        self.names = tuple(name for name, _, _ in streams)
        super().__init__(streams, **options)

    @classmethod
    def of(
        cls,
        streams: Streams,
        batch_size: int,
        max_tokens: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        device: Any = "cpu",
        static: bool = False,
        **format: Any,
    ) -> Self:
        """Return an empty cache; the arguments are those of `new_layer_cache`."""
        return cls(
            streams,
            batch_size=batch_size,
            max_tokens=max_tokens,
            kind=kind,
            device=device,
            static=static,
            **format,
        )
