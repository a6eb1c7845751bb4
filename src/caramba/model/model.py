"""The model: embedder, topology, head, and one forward with or without a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from caramba.cache import TAIL_TOKENS, Context, DeviceContext
from caramba.config.kvcache import KVCacheKind
from caramba.config.model import EmbedderConfig, ModelSpec
from caramba.errors import ConfigError
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents, StoredDocuments
from caramba.layer.rope import RotaryEmbedding, angles_of, share_frequencies, share_rope_tables
from caramba.model.custom_layers import cached_layers, check_decoding, new_cache, refuse_documents
from caramba.model.topology.base import attention_applications, build_node, custom_layers_of

if TYPE_CHECKING:
    from caramba.model.memory import SlotMemory
import hashlib
import itertools
from collections.abc import Iterable

from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Head(nn.Linear):
    """Projection to the vocabulary with weights of its own.

    Shape: hidden [..., M] to logits [..., V].
    """

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class TiedHead(nn.Module):
    """Projection to the vocabulary by the token embedding, which is passed in, so that it has one owner and
    name.

    Shape: hidden [..., M] and the embedding [V, M] to logits [..., V].

    Reference: Press and Wolf, 2016, arXiv:1608.05859.
    """

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        return F.linear(input, token_weight)


def build_head(spec: ModelSpec) -> Head | TiedHead:
    """Return the head that the spec asks for."""
    if spec.head.tied:
        return TiedHead()
    return Head(spec.embedder.d_model, spec.embedder.vocab_size, bias=spec.head.bias)


class Embedder(nn.Module):
    """Token embedding, plus a learned embedding of the position for `type: token_position`.

    Shape: tokens [B, T] int64 to [B, T, M].
    """

    def __init__(self, config: EmbedderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Embedding(config.max_positions, config.d_model) if config.max_positions else None

    def forward(self, tokens: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Embed tokens whose first position is `offset`, or whose positions are `offset` [B, T].

        Raises:
            ConfigError: a position at or above max_positions.
        """
        features = self.token(tokens)
        if self.position is None:
            return features
        end = tokens.shape[1] if isinstance(offset, Tensor) else offset + tokens.shape[1]
        if end > self.position.num_embeddings:
            raise ConfigError(
                f"embedder: the sequence reaches {end} tokens, max_positions={self.position.num_embeddings}; "
                "use shorter sequences or a larger max_positions"
            )
        if isinstance(offset, Tensor):
            return features + self.position(offset)
        return features + self.position(torch.arange(offset, end, device=tokens.device))


TABLE_TOKENS = 65536
"""Tokens up to which a context comes with a table of its angles: 16 MB at 64 features per head."""


class Model(nn.Module):
    """A causal language model built from its spec.

    forward(tokens) scores a whole sequence from position 0. forward(tokens, ctx) scores the next tokens of
    the sequences that `ctx` holds and adds them to it: the logits equal those of one forward over everything,
    in whatever chunks the tokens come. A `DeviceContext` in its place takes one token per sequence.

    `documents` [B, T] int64 separates the documents of packed rows: neighbours with equal ids are of one document,
    attention stays inside it, and its positions count from 0. Each document's logits equal those of a forward over it
    alone.

    Shape: tokens [B, T] int64 to logits [B, T, V].
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedder = Embedder(spec.embedder)
        self.topology = build_node(spec.topology)
        self.head = build_head(spec)
        self._covered: tuple[int, torch.device] | None = None  # tokens and device of the shared angles
        self._slots: SlotMemory | None = None
        self._has_checked = not custom_layers_of(self.topology)  # that custom layers decode as they train

    @property
    def head_weight(self) -> Tensor | None:
        """The weight [V, M] of a head that is one matrix product with it and nothing else, else None."""
        if isinstance(self.head, TiedHead):
            return self.embedder.token.weight
        return self.head.weight if isinstance(self.head, Head) and self.head.bias is None else None

    def forward(
        self, tokens: Tensor, ctx: Context | DeviceContext | None = None, documents: Tensor | None = None
    ) -> Tensor:
        return self.logits(self.hidden(tokens, ctx, documents))

    def hidden(
        self,
        tokens: Tensor,
        ctx: Context | DeviceContext | StoredDocuments | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the topology's output, what the head reads.

        `StoredDocuments` in a context's place are whole prompts one after the other, in one row.

        Shape: tokens [B, T] int64 to [B, T, M].

        Raises:
            ConfigError: tokens that are not [B, T] with T above 0, a context made for another model or batch, or
            documents of another shape or with a context.
        """
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ConfigError(f"model: tokens have shape {tuple(tokens.shape)}, expected [B, T] with T at least 1")
        if documents is not None:
            if ctx is not None or documents.shape != tokens.shape:
                raise ConfigError(
                    f"model: documents have shape {tuple(documents.shape)}, tokens {tuple(tokens.shape)}"
                    f"{'' if ctx is None else ' and a context'}; expected the shape of the tokens and no context: a "
                    "cache holds one document per row"
                )
            refuse_documents(self.topology)
            apart = Documents.of(documents)
            return self.topology(self.embedder(tokens, apart.positions), apart)
        if ctx is None:
            self._share_angles(tokens)
            return self.topology(self.embedder(tokens))
        if isinstance(ctx, StoredDocuments):
            return self.topology(self.embedder(tokens, ctx.positions), ctx)
        ctx.begin()
        offset = ctx.offset if isinstance(ctx, DeviceContext) else ctx.position
        if isinstance(ctx, DeviceContext):
            if ctx.separate_ropes is None and not torch.compiler.is_compiling():
                ctx.separate_ropes = self.ropes_apart()  # a walk over the modules, too long for every step
            if ctx.separate_ropes:
                ctx.angles.update(angles_of(ctx.separate_ropes, ctx.offset))
        hidden = self.topology(self.embedder(tokens, offset), ctx)
        ctx.commit(tokens.shape[1])
        return hidden

    def ropes_apart(self) -> list[RotaryEmbedding]:
        """Return those whose frequencies are parts of the weights, none where they differ in kind: others read a table
        that layers share."""
        ropes = (layer.projection.rope for _, layer in self.attention_layers())
        apart = [rope for rope in ropes if rope is not None and rope.key is None and rope.dynamic is None]
        return apart if share_frequencies(apart) else []

    def _share_angles(self, tokens: Tensor) -> None:
        """Compute the angles of a forward once for all layers, outside of what is compiled."""
        # What is made under inference_mode could not be read by a later training step.
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        covered = (tokens.shape[1], tokens.device)
        if covered != self._covered and type(tokens) is Tensor and tokens.device.type != "meta":
            share_rope_tables(self, *covered)
            self._covered = covered

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token.

        Shape: [..., M] to [..., V].
        """
        return self.head(hidden, self.embedder.token.weight)

    def new_context(
        self,
        batch_size: int,
        max_tokens: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        static: bool = False,
        *,
        tail_tokens: int = TAIL_TOKENS,
        hadamard: bool = False,
        windowed: bool = False,
    ) -> Context:
        """Return an empty context on the model's device, one cache per attention application.

        `static` allocates `max_tokens` at once; otherwise buffers grow geometrically up to it. Quantised kinds
        quantise `tail_tokens` at a time; `hadamard` rotates keys and latents before 4 bits. `windowed` keeps the last
        tokens alone of layers with a window (`WindowLayerKVCache`), for forwards that the host counts.

        Raises:
            ConfigError: a custom layer that cannot be decoded, or decodes other than declared.
        """
        layers = cached_layers(self)
        device = self.embedder.token.weight.device
        if not self._has_checked and device.type != "meta":
            self._has_checked = True
            try:
                check_decoding(self)
            except ConfigError:
                self._has_checked = False
                raise
        if max_tokens <= TABLE_TOKENS and device.type != "meta" and not torch.compiler.is_compiling():
            with torch.inference_mode(False):  # a forward with gradients may read them too
                share_rope_tables(self, max_tokens, device, for_steps=True)
        format = {"tail_tokens": tail_tokens, "hadamard": hadamard}
        return context_of(layers, batch_size, max_tokens, kind, device, static, windowed=windowed, **format)

    def row_limit(self) -> int | None:
        """Return the most tokens of a row of several documents, whatever the length of each; None without a bound."""
        limits = [layer.projection.step_limit for _, layer in self.attention_layers()]
        return min((n for n in (self.spec.embedder.max_positions, *limits) if n is not None), default=None)

    def get_memory_stats(self, tokens: Tensor | None = None) -> dict[str, Any]:
        """Return how memory slots are used; see `SlotMemory.measure`."""
        return self._slot_memory().measure(tokens)

    def resize_memory(
        self, slots: int, *, optimizer: torch.optim.Optimizer | None = None, is_open: bool = False
    ) -> None:
        """Give every memory layer another number of slots; see `SlotMemory.resize`."""
        self._slot_memory().resize(slots, optimizer=optimizer, is_open=is_open)

    reduce_memory_slots = resize_memory

    def _slot_memory(self) -> SlotMemory:
        if self._slots is None:
            from caramba.model.memory import SlotMemory

            self._slots = SlotMemory(self)
        return self._slots

    def attention_layers(self) -> list[tuple[str, AttentionLayer]]:
        """Return (qualified name, layer) for each distinct attention layer, in the order in which they first
        run."""
        return list(dict(attention_applications(self)).items())


def context_of(
    layers: Sequence[nn.Module],
    batch_size: int,
    max_tokens: int,
    kind: KVCacheKind,
    device: torch.device,
    static: bool,
    **format: Any,
) -> Context:
    """Return an empty context with a cache for each of these applications, in execution order."""
    return Context([new_cache(layer, batch_size, max_tokens, kind, device, static, **format) for layer in layers])


def pair_attention(teacher: Model, student: Model) -> list[tuple[str, AttentionLayer, AttentionLayer]]:
    """Pair the attention layers of both models in execution order as (student name, teacher layer, student layer).

    Raises:
        ConfigError: the models have different numbers of attention layers.
    """
    theirs, ours = teacher.attention_layers(), student.attention_layers()
    if len(theirs) != len(ours):
        raise ConfigError(
            f"model.topology: the student has {len(ours)} attention layers, its teacher {len(theirs)}; make them equal"
        )
    return [(name, source, target) for (_, source), (name, target) in zip(theirs, ours, strict=True)]


INIT_STD = 0.02


def build_model(spec: ModelSpec, *, seed: int | None = None, device: torch.device | str = "cpu") -> Model:
    """Build the model of a spec with fresh weights, in float32.

    Linear and embedding weights are normal(0, 0.02); the outputs of residual branches (attention `out`,
    SwiGLU `down`) are scaled by 1/sqrt(2 * depth), depth being the number of attention applications; norms
    are one, biases zero, gates and temperatures neutral. Weights are sampled on the CPU, so a seed gives the
    same model on any device.

    Args:
        seed: seeds these weights and leaves the global generator as it was; None draws from the global
        generator. device: where the model goes. "meta" builds shapes without weights: materialise with
            `model.to_empty(device=...)` and then load or `init_weights`.

    Reference: Radford et al., 2019 (GPT-2), section 2.3, for the residual scale.
    """
    if torch.device(device).type == "meta":
        with torch.device("meta"), SkipInit():
            return Model(spec)
    with _seeded(seed), torch.device("cpu"):
        model = Model(spec)
        init_weights(model)
    return model.to(device)


def init_weights(model: nn.Module) -> None:
    """Draw fresh weights in place from the global CPU generator, as `build_model` describes."""
    depth = max(1, sum(1 for _ in attention_applications(model)))
    residual = {getattr(module, name) for module in model.modules() for name in getattr(module, "residual_outputs", ())}
    # Children first: a module's own reset_parameters may then overrule what its children got.
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD / (2 * depth) ** 0.5 if module in residual else INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def build_empty(spec: ModelSpec, device: torch.device | str) -> Model:
    """Build a model where it runs, in float32, with memory for weights that are still to be read into it."""
    with torch.device(device), SkipInit():
        model = Model(spec)
    return model.to(device)


def build_with_random_weights(spec: ModelSpec, device: torch.device) -> Model:
    """Build a model where it runs, quickly, for what does not depend on its weights: matrices normal(0, 0.02) and the
    rest one, the same on every device of a kind."""
    model = build_empty(spec, device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=INIT_STD, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


class SkipInit(TorchFunctionMode):
    """Leaves `torch.nn.init` out, for weights that something else gives; on "meta" it would load the compiler.

    Buffers are filled: no checkpoint may hold them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            given = args[0] if args else (kwargs or {})["tensor"]
            if isinstance(given, nn.Parameter) or given.is_meta:
                return given
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the accelerators' generators too, which fork_rng(devices=[]) does not
        # restore.
        torch.default_generator.manual_seed(seed)
        yield


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that hold the data: of one that contains several, such as codes and scales, those."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from plain_tensors(getattr(tensor, name) for name in names)
        else:
            yield tensor


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; a tied weight counts once, codes as they are stored."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in plain_tensors(itertools.chain(model.parameters(), model.buffers()))
    }
    return sum(storages.values())


def model_hash(model: Model) -> str:
    """Return a SHA-256 of what a model computes, whatever device it is on.

    It covers the description, for equal weights under another rotary base are another model, and the weights by name,
    class, shape and bytes; of quantised ones, those of codes and scales.
    """
    spec = model.spec
    digest = hashlib.sha256(f"{spec.embedder!r} {spec.topology!r} {spec.head!r}".encode())
    kept = model.state_dict(keep_vars=True)
    for name, whole in kept.items():
        parts = list(plain_tensors([whole]))
        if is_traceable_wrapper_subclass(whole):
            digest.update(type(whole).__name__.encode())
        for tensor in parts:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
