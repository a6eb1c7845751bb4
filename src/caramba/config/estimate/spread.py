"""What one rank holds of a model that trains on several, by the sizes of `parallel`. The rules are few and stated.

ddp, and block phases anywhere: the whole of it; with blockwise=blocks gradients and states of a rank's own blocks.
fsdp2: an equal part of weights, gradients and states; besides, gathered at the peak, what is outside of blocks (in
    float32, with its gradient), the two largest blocks (all of them with SHARD_GRAD_OP) and the gradient of one, in
    the dtype that blocks are gathered in. Over several nodes the parts are those of a node (HSDP).
tp: of attention and gated feed-forward layers a rank's heads and features, and what it keeps for backward but the
    layer's input; norms and the residual stream whole, or of a rank's own tokens with sequence_parallel. Embedding,
    head and logits are whole.
pipeline: the fuller of the first stage, which has min(pp, num_micro_batches) micro-batches alive, and the last, which
    has one, with the logits.
A frozen teacher is whole on every rank, and `batch_size` is that of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from caramba.config.cost import Cost
from caramba.config.estimate.model import ModelCost
from caramba.config.manifest import Manifest
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
    """Return a rank's weights of a node."""
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
