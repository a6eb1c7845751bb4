"""What a whole model costs: embedder, topology and head, and the check that their widths fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from caramba.config.cost import Cost, Unknown, Width, WidthError
from caramba.config.kvcache import KVCacheKind, Streams
from caramba.config.model import ModelConfig, ModelSpec
from caramba.config.topology import LayerError
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.errors import ConfigError

ATTENTION = ("AttentionLayer", "MemoryBankLayer")
"""Types of caramba's attention layers; a user's custom layer may count attention work too."""
PARTS = {
    **dict.fromkeys(ATTENTION, "attention"),
    "SwiGLULayer": "feed-forward",
    "RMSNormLayer": "norms",
    "LayerNormLayer": "norms",
    "LinearLayer": "linear",
}


@dataclass(frozen=True)
class ModelCost:
    """A model's cost; every figure follows from the schema, and leaves out what `undeclared` names.

    `activation_elements` adds to the topology's the head's: its input, the log-probabilities that
    cross-entropy keeps in place of the logits, and their gradient, which is alive at the peak.
    """

    name: str
    vocab_size: int
    d_model: int
    max_positions: int | None
    tied: bool
    embedder_params: int
    head_params: int
    topology: Cost

    @property
    def params(self) -> int:
        """Trainable elements; a tied head has none of its own."""
        return self.embedder_params + self.topology.params + self.head_params

    def undeclared(self, kind: Unknown) -> tuple[str, ...]:
        """Return the types of layers whose `flops`, `activations` or `cache` no figure here counts."""
        return self.topology.undeclared(kind)

    @property
    def params_per_part(self) -> dict[str, int]:
        """Trainable elements of the embedder, each kind of layer, and the head; they add up to `params`."""
        parts = {"embedder": self.embedder_params}
        for leaf, _, copies in self.topology.leaves():
            part = PARTS.get(leaf.type, leaf.type)
            parts[part] = parts.get(part, 0) + leaf.params * copies
        parts["head"] = self.head_params
        return {part: count for part, count in parts.items() if count or part == "head"}

    @property
    def attention_params(self) -> int:
        """Trainable elements of all attention layers: what blockwise distillation trains."""
        return sum(leaf.params * copies for leaf, _, copies in self.topology.leaves() if leaf.type in ATTENTION)

    @property
    def copied_params(self) -> int:
        """Elements of `attention_params` that surgery takes from the teacher as they are (latent layers only)."""
        return sum(leaf.copied_params * copies for leaf, _, copies in self.topology.leaves())

    @property
    def activation_elements(self) -> int:
        """Elements kept per token for a backward pass through the whole model."""
        return self.topology.activation_elements + self.d_model + 2 * self.vocab_size

    @property
    def attention_activation_elements(self) -> int:
        """Elements kept per token for a backward pass through the attention layer that keeps most."""
        return max(
            (leaf.activation_elements for leaf, _, _ in self.topology.leaves() if leaf.type in ATTENTION),
            default=0,
        )

    def with_split_keys(self) -> ModelCost:
        """Return the same where a kernel attends to keys in two parts, which keeps less of them for backward."""
        return replace(self, topology=self.topology.with_split_keys())

    @property
    def kv_layers(self) -> tuple[Streams, ...]:
        """Cached streams of every attention application, in execution order."""
        return self.topology.kv

    def kv_bytes_per_layer(self, kind: KVCacheKind) -> tuple[Fraction, ...]:
        """Exact bytes per token of every layer's cache, in execution order."""
        return self.topology.kv_bytes_per_layer(kind)

    def kv_bytes_per_token(self, kind: KVCacheKind) -> Fraction:
        """Exact bytes per token of all caches together."""
        return self.topology.kv_bytes_per_token(kind)

    def first_bytes(self, kind: KVCacheKind) -> int:
        """Bytes per sequence of first tokens that are cached at full precision, besides those of every token."""
        return self.topology.first_bytes(kind)

    def flops_per_token(self, context: int) -> float:
        """Forward FLOPs per token at a causal context, the head's 2 * V * M included; a lookup costs none."""
        return self.topology.flops_per_token(context) + 2.0 * self.vocab_size * self.d_model

    def decode_flops_per_token(self, context: int) -> float:
        """FLOPs per token of decoding `context` tokens one at a time, the head's included."""
        return self.topology.decode_flops_per_token(context) + 2.0 * self.vocab_size * self.d_model

    def attention_flops_per_token(self, context: int) -> float:
        """Forward FLOPs per token of the attention layers alone, projections included."""
        return sum(
            runs * leaf.flops_per_token(context) for leaf, runs, _ in self.topology.leaves() if leaf.type in ATTENTION
        )

    def flops_of_copied_weights(self) -> float:
        """FLOPs per token of the weight gradients that `copied_params` do without when they stay as they are."""
        return sum(2.0 * runs * leaf.copied_params for leaf, runs, _ in self.topology.leaves())

    def training_flops_per_token(self, context: int) -> float:
        """Forward and backward FLOPs per token when everything trains: three times the forward ones."""
        return 3.0 * self.flops_per_token(context)


def model_cost(spec: ModelSpec, path: str = "model") -> ModelCost:
    """Infer every width of a model and count what it costs.

    Raises:
        ConfigError: a node does not take the width that reaches it; the text starts with its path.
    """
    width = Width(spec.embedder.d_model)
    try:
        topology = spec.topology.infer(width)
        _check_output(topology, width)
    except WidthError as error:
        where = ".".join((f"{path}.topology", *error.path))
        raise ConfigError(f"{where}: {error}") from None
    except LayerError as fault:
        where = ".".join((f"{path}.topology", *fault.path))
        raise ConfigError(f"{where}: {fault.message}") from fault.__cause__
    vocabulary, positions = spec.embedder.vocab_size * width.d_model, spec.embedder.max_positions
    return ModelCost(
        name=spec.name or spec.type,
        vocab_size=spec.embedder.vocab_size,
        d_model=width.d_model,
        max_positions=positions,
        tied=spec.head.tied,
        embedder_params=vocabulary + (positions or 0) * width.d_model,
        head_params=0 if spec.head.tied else vocabulary + (spec.embedder.vocab_size if spec.head.bias else 0),
        topology=topology,
    )


def check_widths(model: ModelConfig, path: str = "model") -> None:
    """Check every width of a model and, where its teacher is described, of the teacher.

    Raises:
        ConfigError: naming the first node whose input width is wrong, what it got from where, and the fix.
    """
    model_cost(model, path)
    if model.teacher is not None and model.teacher.manifest is not None:
        model_cost(model.teacher.manifest, f"{path}.teacher.manifest")


def _check_output(topology: Cost, embedded: Width) -> None:
    if topology.width_out != embedded:
        last = f"layers[{len(topology.children) - 1}]"
        message = f"feeds the head: expects width {embedded.d_model} out, the embedder's"
        raise WidthError(message, topology.width_out.label, f"end it with width {embedded.d_model}", source=last)


def runs_teacher(phase: PhaseConfig) -> bool:
    """Return whether a phase runs the teacher: to feed blocks, or for its logits."""
    return phase.phase in BLOCK_PHASES or phase.objective in ("kl", "mixed")


def training_flops(
    phase: PhaseConfig, trained: ModelCost, teacher: ModelCost | None, *, keeps_copied: bool = False
) -> float | None:
    """Return the FLOPs of a token in a phase that trains `trained`, with the teacher's if the phase runs it.

    None if a layer that runs does not declare its work. With `keeps_copied` the weights that surgery copied take no
    gradient.
    """
    blockwise, context = phase.phase in BLOCK_PHASES, phase.block_size
    running = teacher if runs_teacher(phase) else None
    ran = [trained] if running is None else [trained, running]
    if not blockwise and any(model.undeclared("flops") for model in ran):
        return None
    if blockwise:
        flops = 3.0 * trained.attention_flops_per_token(context)
        if keeps_copied:
            flops -= trained.flops_of_copied_weights()
    else:
        flops = trained.training_flops_per_token(context)
    if phase.phase == "drift":
        flops += trained.topology.flops_per_token(context)
    if running is not None:
        flops += running.topology.flops_per_token(context) if blockwise else running.flops_per_token(context)
    return flops
