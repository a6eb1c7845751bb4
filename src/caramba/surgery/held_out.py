"""What a layer's maps cost in its own block's output, on windows that calibration did not see."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from caramba.config.kvcache import KVCacheKind
from caramba.errors import CheckpointError
from caramba.layer import AttentionLayer, Documents
from caramba.layer.attention import CacheRounding
from caramba.layer.latent import attend_with_prefix, read_first
from caramba.layer.rope import rotate
from caramba.layer.score import CausalScore
from caramba.model import Model
from caramba.ops.backend import upcast
from caramba.surgery.collect import batches, project_without_rope, standard_projection
from caramba.surgery.latent import LatentMaps
from caramba.surgery.per_head import PerHeadMaps

KEPT_BYTES = 4 * 2**30


@dataclass(frozen=True)
class EvalWindows:
    """One layer on held-out windows [N, T]: its queries, keys and values before RoPE, its output without bias, and
    the separate documents, of which padding has the id -1.

    Shape: q [N, H, T, D], k and v [N, K, T, .], output [N, T, M], documents [N, T].
    """

    layer: AttentionLayer
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    documents: Tensor | None = None

    def relative(self, found: Tensor) -> float:
        """Return |found - output| / |output|, in the root mean square, of an output without bias or padding."""
        counted = ... if self.documents is None else self.documents >= 0
        wanted = self.output[counted]
        return float((found[counted] - wanted).pow(2).sum().sqrt() / wanted.pow(2).sum().sqrt())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the layer's window, within documents. Shape: [N, H, T, D], [N, K, T, D] and [N, K, T, Dv]."""
        return CausalScore(self.layer.config.local_window)(q, k, v, None, self.first)

    def to(self, device: torch.device | str) -> "EvalWindows":
        """Return the same on `device`; the layer stays where it is."""
        moved = {
            name: None if (value := getattr(self, name)) is None else value.to(device)
            for name in ("q", "k", "v", "output", "documents")
        }
        return dataclasses.replace(self, **moved)

    @property
    def first(self) -> Tensor | None:
        """The place in its row where each token's document begins, [N, T], None where a row is one sequence."""
        return None if self.documents is None else Documents.of(self.documents).first


@torch.no_grad()
def capture(
    teacher: Model,
    layers: Sequence[tuple[str, AttentionLayer]],
    windows: Tensor,
    documents: Tensor | None = None,
) -> list[EvalWindows]:
    """Run the teacher on token windows [N, T] and keep what each named layer saw, in at least fp32.

    Memory: about 4 N T (2 M + H D + 2 K D) bytes a layer. Where all layers take more than KEPT_BYTES, what they saw
    waits in the host's memory.

    Raises:
        CheckpointError: a layer gave a value that is not finite; the message names it.
    """
    device = teacher.embedder.token.weight.device
    place = device if _kept_bytes(layers, windows) <= KEPT_BYTES else torch.device("cpu")
    inputs: dict[str, list[Tensor]] = {name: [] for name, _ in layers}
    outputs: dict[str, list[Tensor]] = {name: [] for name, _ in layers}
    kept_apart: dict[str, list[Tensor]] = {name: [] for name, _ in layers}
    ids: Tensor | None = None

    def at(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(layer, AttentionLayer)
            if not torch.isfinite(output).all():
                raise CheckpointError(
                    f"surgery: held-out text gave values in {name} that are not finite; look at the teacher's weights "
                    "(a damaged or half-precision checkpoint), or use other calibration data"
                )
            inputs[name].append(args[0].to(place))
            if ids is not None:
                kept_apart[name].append(ids)
            plain = upcast(output) - (0 if layer.out.bias is None else layer.out.bias)
            outputs[name].append(plain.to(place))

        return hook

    with ExitStack() as stack:
        for name, layer in layers:
            stack.callback(layer.register_forward_hook(at(name)).remove)
        for batch, ids in batches(windows, documents, device):
            teacher.hidden(batch, documents=ids)
    found = []
    for name, layer in layers:
        q, k, v = project_without_rope(layer, torch.cat(inputs.pop(name)).to(device))
        output = torch.cat(outputs.pop(name))
        seen = torch.cat(kept_apart[name]) if documents is not None else None
        found.append(EvalWindows(layer, upcast(q), upcast(k), upcast(v), output, seen).to(place))
    return found


def sink_token(held: EvalWindows) -> Tensor:
    """Return the mean [k; v] of the first tokens of all sequences, where pretrained models have their attention sink.

    Shape: [K (D + Dv)] float64, keys and values head by head.
    """
    n, t = held.q.shape[0], held.q.shape[2]
    at_first = torch.arange(t, device=held.q.device).expand(n, t) == (0 if held.first is None else held.first)
    if held.documents is not None:
        at_first = at_first & (held.documents >= 0)
    keys, values = (x.transpose(1, 2).flatten(2)[at_first].double().mean(0) for x in (held.k, held.v))
    return torch.cat((keys, values))


def _kept_bytes(layers: Sequence[tuple[str, AttentionLayer]], windows: Tensor) -> int:
    widths = (
        2 * layer.config.d_model
        + layer.dims.n_heads * layer.dims.qk
        + layer.dims.n_kv_heads * (layer.dims.qk + layer.dims.v)
        for _, layer in layers
    )
    return 4 * windows.numel() * sum(widths)


@torch.no_grad()
def latent_output(
    held: EvalWindows, maps: LatentMaps, first_tokens: int = 0, kind: KVCacheKind | None = None
) -> Tensor:
    """Return the block output, without bias, of a latent layer with these maps, [N, T, M].

    The first `first_tokens` of each sequence, or document, keep their own keys and values. With a `kind` latent and
    geometric keys are what a cache of it stores.
    """
    layer = held.layer
    dims, dtype = layer.dims, held.q.dtype
    group = dims.n_heads // dims.n_kv_heads

    def per_head(map_: Tensor) -> Tensor:
        return map_.to(dtype).repeat_interleave(group, 0)

    rope = standard_projection(layer).rope
    assert rope is not None
    q_sem = held.q @ per_head(maps.query)
    q_geo = held.q @ per_head(maps.geometry.query)
    keys, values = (x.transpose(1, 2).flatten(2) for x in (held.k, held.v))
    c = maps.normalize((torch.cat((keys, values), -1) - maps.mean.to(dtype)) @ maps.latent.to(dtype))
    k_geo = (keys @ maps.geometry.key.to(dtype))[:, None]
    cos, sin = _table(held, maps.frequencies, rope.attention_factor)
    q = torch.cat((q_sem, rotate(q_geo, cos, sin)), -1) * dims.qk**-0.5
    streams = {"c": c[:, None], "k_geo": rotate(k_geo, cos, sin)}
    if kind is not None:
        sizes = tuple((name, 1, x.shape[-1]) for name, x in streams.items())
        streams = CacheRounding(kind, sizes)(streams)
    c = streams["c"][:, 0]
    k = torch.cat((streams["c"], streams["k_geo"]), -1)
    n = dims.n_kv_heads * dims.qk
    mean = maps.mean[n:].to(dtype).unflatten(0, (dims.n_kv_heads, dims.v))
    if first_tokens:
        kept, total = _read_first(held, maps, mean, first_tokens)
        score, first = CausalScore(layer.config.local_window), held.first
        k = k.to(dtype)
        out, share = attend_with_prefix(score, q.to(dtype), k, k, total, first_tokens, first)
        out = out[..., : maps.rank] @ per_head(maps.value) + share * kept
    else:
        out = held.attend(q, k, c[:, None]) @ per_head(maps.value)
    return _project(layer, out + mean.repeat_interleave(group, 0)[:, None])


def _read_first(held: EvalWindows, maps: LatentMaps, mean: Tensor, first_tokens: int) -> tuple[Tensor, Tensor]:
    """Return what the first tokens' own keys and values give, less the values' mean, and their log-sum-exp."""
    rope = standard_projection(held.layer).rope
    assert rope is not None
    dtype, n_tokens, scale = held.q.dtype, held.q.shape[2], held.layer.dims.qk**-0.5
    cos, sin = _table(held, rope.inv_freq, rope.attention_factor)
    k, v = rotate(held.k, cos, sin).to(dtype), held.v - mean[:, None]
    first = held.first
    if first is None:
        k, v = k[:, :, :first_tokens], v[:, :, :first_tokens]
    q, q_sem = rotate(held.q, cos, sin).to(dtype) * scale, held.q * scale
    return read_first(q, q_sem, k, v, maps.key_mean.to(dtype), first_tokens, n_tokens, first)


@torch.no_grad()
def per_head_output(held: EvalWindows, maps: PerHeadMaps) -> Tensor:
    """Return the block output, without bias, of a per-head layer with these maps, [N, T, M]."""
    layer = held.layer
    dims, dtype = layer.dims, held.q.dtype
    group = dims.n_heads // dims.n_kv_heads
    rope = standard_projection(layer).rope
    assert rope is not None
    rows, factor = maps.rows, rope.attention_factor
    cos, sin = _table(held, rope.inv_freq[0][maps.pairs], factor)

    def kept(x: Tensor, at: Tensor) -> Tensor:
        return x.gather(-1, at[None, :, None].expand(x.shape[0], -1, x.shape[2], -1))

    readers = maps.query.to(dtype).repeat_interleave(group, 0)
    q_geo = rotate(
        kept(held.q, rows.repeat_interleave(group, 0)),
        cos.repeat_interleave(group, 0),
        sin.repeat_interleave(group, 0),
    )
    q = torch.cat((held.q @ readers * factor**2, q_geo), -1) * dims.qk**-0.5
    k = torch.cat((held.k @ maps.key.to(dtype), rotate(kept(held.k, rows), cos, sin)), -1)
    out = held.attend(q, k, held.v @ maps.value.to(dtype))
    out = out @ maps.expansion.to(dtype).repeat_interleave(group, 0)
    return _project(layer, out + maps.constant.to(dtype).repeat_interleave(group, 0)[:, None])


def _table(held: EvalWindows, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    positions = torch.arange(held.q.shape[2], dtype=torch.float32, device=held.q.device)
    angles = positions[:, None] * frequencies.to(held.q.device)[:, None, :]
    return angles.cos() * factor, angles.sin() * factor


def _project(layer: AttentionLayer, heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2) @ layer.out.weight.to(heads.dtype).T
