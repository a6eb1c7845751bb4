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
Several ranks: what one of them holds, by the sizes of `parallel`:
    ddp, and block phases anywhere: the whole of it; with blockwise=blocks gradients and states of a rank's own blocks.
    fsdp2: an equal part of weights, gradients and states; besides, gathered at the peak, what is outside of blocks (in
        float32, with its gradient), the two largest blocks (all of them with SHARD_GRAD_OP) and the gradient of one,
        in the dtype that blocks are gathered in. Over several nodes the parts are those of a node (HSDP).
    tp: of attention and gated feed-forward layers a rank's heads and features, and what it keeps for backward but the
        layer's input; norms and the residual stream whole, or of a rank's own tokens with sequence_parallel.
        Embedding, head and logits are whole.
    pipeline: the fuller of the first stage, which has min(pp, num_micro_batches) micro-batches alive, and the last,
        which has one, with the logits.
    A frozen teacher is whole on every rank, and `batch_size` is that of a rank.
On top of a step that one device took (`rank_bytes`): under ddp nothing, for gradients are averaged in place; with
    sums in bfloat16 those of two exchanges, of as many gradients as go at once or of the largest layer. Under fsdp2
    what is gathered, less
    the other ranks' weights and states: gradients, which may not exist at the peak of activations, take nothing off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from caramba.config.cost import Cost
from caramba.config.estimate.model import ModelCost, runs_teacher, training_flops
from caramba.config.extension import name_of
from caramba.config.manifest import Manifest
from caramba.config.optimizer import portfolio_bytes
from caramba.config.parallel import ParallelConfig
from caramba.config.train import BLOCK_PHASES, PhaseConfig

SPLIT_BY_TP = ("AttentionLayer", "SwiGLULayer")


@dataclass(frozen=True)
class ParallelLayout:
    """A strategy, how many ranks share the data, and on how many nodes.

    Where dp=auto is what the machine that runs it has, `is_open`, both numbers are 1.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data_ranks: int = 1
    nodes: int = 1
    is_open: bool = False

    @property
    def shards(self) -> int:
        """Ranks among which fsdp2 cuts weights."""
        is_hybrid = self.parallel.tp == 1 and self.parallel.sharding in (None, "HYBRID_SHARD")
        return max(1, self.data_ranks // (self.nodes if is_hybrid else 1))


@dataclass(frozen=True)
class RankMemory:
    """What a rank holds: elements of weights, the bytes that it gathers, elements per token that backward needs, the
    share of the batch that is alive at a time, whether it makes logits, and of how many ranks' blocks its are."""

    params: int
    gathered_bytes: int
    activation_elements: int
    alive: Fraction = Fraction(1)
    has_head: bool = True
    block_owners: int = 1


def spread_of(manifest: Manifest) -> ParallelLayout:
    """Return how a manifest spreads its phases; dp=auto counts the ranks of the launcher where it names them."""
    parallel, nodes = manifest.parallel, manifest.launcher.nodes or 1
    if parallel.strategy in ("single", "pipeline"):
        return ParallelLayout(parallel)
    if parallel.dp != "auto":
        return ParallelLayout(parallel, parallel.dp, nodes)
    on_node = manifest.open_ranks_per_node
    if on_node is None:
        return ParallelLayout(parallel, is_open=True)
    return ParallelLayout(parallel, max(1, nodes * on_node // parallel.tp), nodes)


def holdings(phase: PhaseConfig, model: ModelCost, spread: ParallelLayout) -> tuple[RankMemory, ...]:
    """Return what the ranks hold that may be the fullest."""
    parallel = spread.parallel
    elements = model.activation_elements - 2 * model.vocab_size
    if phase.phase in BLOCK_PHASES or parallel.strategy in ("single", "ddp"):
        owners = spread.data_ranks if parallel.blockwise == "blocks" and phase.phase == "blockwise" else 1
        return (RankMemory(model.params, 0, elements, block_owners=owners),)
    if parallel.strategy == "pipeline":
        return _stages(model, parallel)
    tp = parallel.tp
    outside = model.embedder_params + model.head_params
    layers = _params(model.topology, tp)
    kept = sum(runs * _kept(leaf, parallel) for leaf, runs, _ in model.topology.leaves()) + model.d_model
    params = -(-(outside + layers) // spread.shards)
    return (RankMemory(params, _gathered(phase, model, spread, outside), kept),)


def _gathered(phase: PhaseConfig, model: ModelCost, spread: ParallelLayout, outside: int) -> int:
    if spread.shards == 1:
        return 0
    parallel = spread.parallel
    units = sorted(_units(model.topology, parallel.tp), reverse=True)
    root = outside + _params(model.topology, parallel.tp) - sum(units)
    is_narrow = parallel.mixed_precision == "bfloat16" or (
        parallel.mixed_precision == "auto" and phase.dtype == "bfloat16"
    )
    alive = units if parallel.sharding == "SHARD_GRAD_OP" else units[:2]
    return 2 * 4 * root + (2 if is_narrow else 4) * (sum(alive) + max(units, default=0))


def _stages(model: ModelCost, parallel: ParallelConfig) -> tuple[RankMemory, RankMemory]:
    """Return what the first and the last stage hold of a uniform stack; what is none is counted as one stage."""
    children = model.topology.children
    at = next((index for index, child in enumerate(children) if child.type == "NestedTopology"), 0)
    before, after = children[:at], children[at + 1 :]
    pp, parts = parallel.pp, parallel.micro_batches
    tied = model.embedder_params if model.tied else 0
    own, kept = -(-children[at].params // pp), -(-children[at].activation_elements // pp)
    return (
        RankMemory(
            model.embedder_params + sum(child.params for child in before) + own,
            0,
            sum(child.activation_elements for child in before) + kept,
            alive=Fraction(min(pp, parts), parts),
            has_head=False,
        ),
        RankMemory(
            tied + model.head_params + sum(child.params for child in after) + own,
            0,
            sum(child.activation_elements for child in after) + kept + model.d_model,
            alive=Fraction(1, parts),
        ),
    )


def _params(cost: Cost, tp: int) -> int:
    if not cost.children:
        return -(-cost.params // tp) if cost.type in SPLIT_BY_TP else cost.params
    return sum(_params(child, tp) for child in cost.children) * (1 if cost.shared else cost.repeat)


def _kept(leaf: Cost, parallel: ParallelConfig) -> int:
    """Return what a rank keeps of a layer's activations, per token of the sequence."""
    if leaf.type in SPLIT_BY_TP:
        width = leaf.width_in.d_model
        return width + -(-(leaf.activation_elements - width) // parallel.tp)
    return -(-leaf.activation_elements // (parallel.tp if parallel.sequence_parallel else 1))


def _units(cost: Cost, tp: int) -> Iterator[int]:
    """Yield a rank's weights of everything that fsdp2 gathers as one, as `topology.sharding_units` finds them."""
    if cost.type == "NestedTopology":
        yield from [_params(cost, tp) // cost.repeat] * cost.repeat
    elif cost.type == "StackedTopology":
        for child in cost.children:
            yield from _units(child, tp)
    elif cost.params and (cost.children or cost.type in SPLIT_BY_TP):
        yield _params(cost, tp)


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
    memory = max((_on_rank(phase, trained, running, params, one) for one in held), key=lambda one: one.total_bytes)
    uncounted = () if blockwise else trained.undeclared("activations")
    return PhaseEstimate(params, flops, memory, uncounted)


def rank_bytes(phase: PhaseConfig, trained: ModelCost, spread: ParallelLayout, *, keeps_whole: bool = False) -> int:
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
        activations_bytes=alive * kept * _activation_bytes(phase) + 4 * rows * vocabularies * trained.vocab_size,
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
