"""Estimates of a phase's memory and work. The rules are few and stated; a measurement always wins over them.

Weights: 4 bytes each, for every model that the phase holds; 2 for weights in bfloat16 (dtype=bfloat16 with
    use_amp=false), and for a frozen teacher under 16-bit autocast.
Gradients: as many bytes as the weights, for the parameters that train.
Optimiser: states of the parameters that train, in the dtype of the weights: two for AdamW, one for SGD with
    momentum, Lion and Muon, and none counted for Adafactor, whose factored moments are a row and a column per
    matrix. They are fp32 beside bfloat16 weights that are rounded from fp32 (another 4 bytes for masters) or at
    random; the fp32 copies of one step, while no activation is held, are not counted. None on the device with
    optimizer_offload.
Activations: batch * block * elements kept for backward, in the dtype of the computation (`auto` counts as
    fp32). A blockwise phase frees each block before the next, so it holds the largest attention layer, and
    the teacher's input and output of it. Other phases make logits `vocab_chunk` tokens at a time, all at once with
    cross_entropy=dense, in fp32: two vocabularies per token of a chunk, and one more of a phase that matches the
    teacher's logits. Those that activation_offload takes off the device are counted as if they stayed.
Work per token: three times the forward FLOPs of what trains (forward, and twice that backward), plus one
    forward pass of the teacher where the phase runs it, without its head when it only feeds blocks. Copied weights
    that stay as they are (trainable=maps) take no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from caramba.config.train import PhaseConfig
from caramba.cost.model import ModelCost

OPTIMIZER_STATES = {"adamw": 2, "sgd": 1, "lion": 1, "muon": 1, "adafactor": 0}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what holds them."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them together; the peak, since none is freed within a step."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


@dataclass(frozen=True)
class PhaseEstimate:
    """What one phase trains, and what it takes."""

    trained_params: int
    flops_per_token: float
    memory: MemoryEstimate


def estimate_phase(
    phase: PhaseConfig, trained: ModelCost, teacher: ModelCost | None, *, keeps_copied: bool = False
) -> PhaseEstimate:
    """Estimate a phase that trains `trained`; `teacher` may run beside it, None when there is none.

    With `keeps_copied` the weights that surgery copied stay as they are, and take no gradient.
    """
    blockwise = phase.phase in ("blockwise", "drift")
    context = phase.block_size
    if blockwise:
        params = trained.attention_params
        kept = trained.attention_activation_elements + 2 * trained.d_model
        flops = 3.0 * trained.attention_flops_per_token(context)
        if keeps_copied:
            params -= trained.copied_params
            flops -= trained.copied_flops_per_token()
    else:
        params = trained.params
        kept = trained.activation_elements - 2 * trained.vocab_size
        flops = trained.training_flops_per_token(context)
    width = 2 if phase.has_16_bit_weights else 4
    weights = trained.params * width
    vocabularies = 0 if blockwise else 2
    if phase.phase == "drift":
        flops += trained.topology.flops_per_token(context)
    if teacher is not None and runs_teacher(phase):
        weights += teacher.params * _activation_bytes(phase)
        vocabularies += 0 if blockwise else 1
        flops += teacher.topology.flops_per_token(context) if blockwise else teacher.flops_per_token(context)
    tokens = (phase.batch_size if isinstance(phase.batch_size, int) else 1) * phase.block_size
    rows = tokens if phase.cross_entropy == "dense" else min(tokens, phase.vocab_chunk)
    memory = MemoryEstimate(
        weights_bytes=weights,
        gradients_bytes=params * width,
        optimizer_bytes=params * _optimizer_bytes(phase),
        activations_bytes=tokens * kept * _activation_bytes(phase)
        + 4 * rows * vocabularies * trained.vocab_size,
    )
    return PhaseEstimate(params, flops, memory)


def runs_teacher(phase: PhaseConfig) -> bool:
    """Return whether a phase runs the teacher: to feed blocks, or for its logits."""
    return phase.phase in ("blockwise", "drift") or phase.objective in ("kl", "mixed")


def _optimizer_bytes(phase: PhaseConfig) -> int:
    """Bytes of the optimiser's states of one parameter, its master included."""
    if phase.optimizer_offload:
        return 0
    is_wide = phase.master_weights or phase.stochastic_rounding or not phase.has_16_bit_weights
    return (4 if is_wide else 2) * OPTIMIZER_STATES[phase.optimizer] + (4 if phase.master_weights else 0)


def _activation_bytes(phase: PhaseConfig) -> int:
    """Bytes of an activation, and of a frozen teacher's weight: 2 in 16 bits, which `auto` leaves open."""
    is_amp = phase.use_amp is True or (phase.use_amp == "auto" and phase.dtype in ("bfloat16", "float16"))
    return 2 if is_amp or phase.has_16_bit_weights else 4
