"""Estimates of a phase's memory and work. The rules are few and stated; a measurement always wins over them.

Weights: 4 bytes each, for every model that the phase holds; 2 for weights in bfloat16 (dtype=bfloat16 with
    use_amp=false), and for a frozen teacher under 16-bit autocast.
Gradients: as many bytes as the weights, for the parameters that train.
Optimiser: states of the parameters that train, in the dtype of the weights: two for AdamW, one for SGD with
    momentum, Lion and Muon, none for SGD without, and none counted for Adafactor, whose factored moments are a row
    and a column per matrix. They are fp32 with bfloat16 weights that are rounded from fp32 (another 4 bytes for
    masters) or at random: with AdamW 12 bytes a parameter in all, for its step copies nothing. The fp32 copies of
    some weights and gradients in a step of the others, without activations in memory, are not counted. None on the
    device with optimizer_offload.
Activations: batch * block * elements kept for backward, in the dtype of the computation (`auto` counts as
    fp32). A blockwise phase frees each block before the next, so it holds the largest attention layer, and
    the teacher's input and output of it. Other phases make logits `vocab_chunk` tokens at a time, all at once with
    cross_entropy=dense, in fp32: two vocabularies per token of a chunk, and one more of a phase that matches the
    teacher's logits. They are those of plain PyTorch, but for wide keys that a kernel never joins (`keeps_parts`).
    Those that activation_offload takes off the device are counted as if they stayed.
Work per token: three times the forward FLOPs of what trains (forward, and twice that backward), plus one
    forward pass of the teacher where the phase runs it, without its head when it only feeds blocks. Copied weights
    that stay as they are (trainable=maps) take no gradient.
Several ranks: what one of them holds, by the rules of `spread`.
On top of a step that one device took (`rank_bytes`): under ddp nothing, for gradients are averaged in place; with
    sums in bfloat16 those of two exchanges, of as many gradients as go at once or of the largest layer. Under fsdp2
    what is gathered, less
    the other ranks' weights and states: gradients, which may not exist at the peak of activations, take nothing off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from caramba.config.estimate.model import ModelCost, runs_teacher, training_flops
from caramba.config.estimate.spread import ParallelLayout, RankMemory, holdings
from caramba.config.extension import name_of
from caramba.config.optimizer import portfolio_bytes
from caramba.config.train import BLOCK_PHASES, PhaseConfig

OPTIMIZER_STATES = {
    "adamw": 2,
    "sgd": 1,
    "lion": 1,
    "muon": 1,
    "adafactor": 0,
    "swats": 2,
    "pidao": 2,
    "pidao_adaptive": 3,
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what holds them."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    gathered_bytes: int = 0
    """Weights of other ranks, and their gradients, at the peak."""

    @property
    def total_bytes(self) -> int:
        """All of them together; the peak, since none but what is gathered is freed within a step."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.gathered_bytes
        )


@dataclass(frozen=True)
class PhaseEstimate:
    """What one phase trains, and what it takes.

    `flops_per_token` is None where a layer that it runs does not declare its work; `uncounted` are the types of layers
    that do not declare what they keep for backward, without which the memory is a lower bound.
    """

    trained_params: int
    flops_per_token: float | None
    memory: MemoryEstimate
    uncounted: tuple[str, ...] = ()


def estimate_phase(
    phase: PhaseConfig,
    trained: ModelCost,
    teacher: ModelCost | None,
    *,
    keeps_copied: bool = False,
    spread: ParallelLayout | None = None,
) -> PhaseEstimate:
    """Estimate a phase that trains `trained`; `teacher` may run with it, None when there is none.

    With `keeps_copied` the weights that surgery copied stay as they are, and take no gradient. With `spread` memory is
    that of the fullest rank; parameters and work are those of the model.
    """
    blockwise = phase.phase in BLOCK_PHASES
    params = trained.attention_params if blockwise else trained.params
    if blockwise and keeps_copied:
        params -= trained.copied_params
    flops = training_flops(phase, trained, teacher, keeps_copied=keeps_copied)
    running = teacher if runs_teacher(phase) else None
    held = holdings(phase, trained, spread or ParallelLayout())
    memory = max(
        (_on_rank(phase, trained, running, params, one) for one in held), key=lambda one: one.total_bytes
    )
    uncounted = () if blockwise else trained.undeclared("activations")
    return PhaseEstimate(params, flops, memory, uncounted)


def rank_bytes(
    phase: PhaseConfig, trained: ModelCost, spread: ParallelLayout, *, keeps_whole: bool = False
) -> int:
    """Return how much more a rank stores at its peak than one device at the peak of the same step.

    At most: of what ranks share only what is there throughout a step counts. With `keeps_whole` the whole model waits
    where a rank's part of it trains, on the host.
    """
    if spread.data_ranks * spread.parallel.ranks_per_batch == 1:
        return 0
    whole = estimate_phase(phase, trained, None).memory
    if spread.parallel.is_sharded and phase.phase not in BLOCK_PHASES:
        part = estimate_phase(phase, trained, None, spread=spread).memory
        kept = part.weights_bytes + part.optimizer_bytes + part.gathered_bytes
        return kept - whole.optimizer_bytes - (0 if keeps_whole else whole.weights_bytes)
    is_own = phase.phase in BLOCK_PHASES or phase.has_16_bit_weights or phase.lora is not None
    if is_own or spread.parallel.reduce_dtype != "bfloat16":
        return 0
    layers = [leaf.params for leaf, _, _ in trained.topology.leaves()]
    largest = max(trained.embedder_params, trained.head_params, *layers)
    one = 2 * max(spread.parallel.bytes_at_once(whole.gradients_bytes) // 4, largest)
    return min(2 * one, whole.gradients_bytes // 2)


def _on_rank(
    phase: PhaseConfig, trained: ModelCost, teacher: ModelCost | None, params: int, held: RankMemory
) -> MemoryEstimate:
    """Return the memory of a rank with its part of a model of which `params` train."""
    blockwise = phase.phase in BLOCK_PHASES
    kept = held.activation_elements
    if blockwise:
        kept = trained.attention_activation_elements + 2 * trained.d_model
        params = -(-params // held.block_owners)
    else:
        params = held.params
    width = 2 if phase.has_16_bit_weights else 4
    weights = held.params * width
    vocabularies = 2 if held.has_head and not blockwise else 0
    if teacher is not None:
        weights += teacher.params * _activation_bytes(phase)
        vocabularies += 0 if blockwise else 1
    tokens = (phase.batch_size if isinstance(phase.batch_size, int) else 1) * phase.block_size
    alive = math.ceil(tokens * held.alive)
    rows = alive if phase.cross_entropy == "dense" else min(alive, phase.vocab_chunk)
    return MemoryEstimate(
        weights_bytes=weights,
        gradients_bytes=params * width,
        optimizer_bytes=params * _optimizer_bytes(phase),
        activations_bytes=alive * kept * _activation_bytes(phase)
        + 4 * rows * vocabularies * trained.vocab_size,
        gathered_bytes=held.gathered_bytes,
    )


def keeps_parts(phase: PhaseConfig, device: str, kernels: str) -> bool:
    """Return whether wide keys of a phase stay in two parts: computed in 16 bits on a device that is known to have the
    kernel. Where either is left open they count as joined, which is more."""
    return device == "cuda" and kernels != "reference" and _activation_bytes(phase) == 2


def _optimizer_bytes(phase: PhaseConfig) -> int:
    """Bytes of the optimiser's states of one parameter, its master included."""
    if phase.optimizer_offload:
        return 0
    if phase.orchestrator_enabled:
        return portfolio_bytes(phase, 1)["states"]
    is_wide = phase.master_weights or phase.stochastic_rounding or not phase.has_16_bit_weights
    is_stateless = phase.optimizer == "sgd" and phase.optimizer_momentum == 0
    states = 0 if is_stateless else OPTIMIZER_STATES.get(name_of(phase.optimizer), OPTIMIZER_STATES["adamw"])
    return (4 if is_wide else 2) * states + (4 if phase.master_weights is True else 0)


def _activation_bytes(phase: PhaseConfig) -> int:
    """Bytes of an activation, and of a frozen teacher's weight: 2 in 16 bits, which `auto` leaves open."""
    is_amp = phase.use_amp is True or (phase.use_amp == "auto" and phase.dtype in ("bfloat16", "float16"))
    return 2 if is_amp or phase.has_16_bit_weights else 4
