"""The first blocks of a model as a model: they draft for the whole of it, on its own caches."""

from collections.abc import Iterator

from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.model.custom_layers import cached_layers
from caramba.model.model import Model, context_of
from caramba.model.topology.base import (
    CyclicTopology,
    NestedTopology,
    ResidualTopology,
    StackedTopology,
    attention_applications,
)


class EarlyExit:
    """A model left after its first blocks: embedder, n blocks, then what follows the last block, and the head.

    A block is a residual node with attention and the residual nodes up to the next such one. Stacks, repeats and
    cycles are unrolled in the order in which they run, so the attention applications that are left are the first ones
    of the model's own, and the first caches of its context serve both.

    Raises:
        ConfigError: a topology that is no row of residual blocks, or too many or too few of them.

    Reference: Elhoushi et al., 2024, arXiv:2404.16710 (self-speculative decoding).
    """

    def __init__(self, model: Model, n_blocks: int | None = None) -> None:
        """Take the first `n_blocks`, or a quarter of the model's, at least one."""
        front, body, tail = _parts(list(_unrolled(model.topology)))
        starts = [index for index, node in enumerate(body) if _attends(node)]
        if len(starts) < 2:
            raise ConfigError(
                f"early exit: the model has {len(starts)} residual blocks with attention, leaving early needs 2; "
                "use spec_method=lookup, or draft with a smaller model"
            )
        n = max(1, len(starts) // 4) if n_blocks is None else n_blocks
        if not 1 <= n < len(starts):
            raise ConfigError(
                f"early exit: spec_draft_layers={n} of a model of {len(starts)} blocks; expected 1 to {len(starts) - 1}"
            )
        self.model, self.n_blocks = model, n
        self.nodes = (*front, *body[: starts[n]], *tail)
        self.layers = [layer for node in self.nodes for layer in cached_layers(node)]

    @property
    def embedder(self) -> nn.Module:
        """The model's embedder."""
        return self.model.embedder

    def hidden(self, tokens: Tensor, ctx: Context | DeviceContext) -> Tensor:
        """Return what the head reads. Shape: tokens [B, T] int64 to [B, T, M]."""
        ctx.begin()
        x = self.model.embedder(tokens, ctx.offset if isinstance(ctx, DeviceContext) else ctx.position)
        for node in self.nodes:
            x = node(x, ctx)
        ctx.commit(tokens.shape[1])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token. Shape: [..., M] to [..., V]."""
        return self.model.logits(hidden)

    def new_context(self, batch_size: int, max_tokens: int, kind: KVCacheKind, static: bool = False) -> Context:
        """Return an empty context of the blocks that are left."""
        device = self.model.embedder.token.weight.device
        return context_of(self.layers, batch_size, max_tokens, kind, device, static)

    def shared(self, ctx: Context) -> Context:
        """Return a context on the first caches of the model's own: what it stores there the model's next forward
        takes back."""
        first = Context(ctx.caches[: len(self.layers)])
        first.position = ctx.position
        return first


def _unrolled(node: nn.Module) -> Iterator[nn.Module]:
    """Yield the nodes of a topology in the order in which they run, each on the output of the one before."""
    if not isinstance(node, StackedTopology | NestedTopology | CyclicTopology):
        yield node
        return
    for _ in range(node.passes):
        for child in node.layers:
            yield from _unrolled(child)


def _parts(nodes: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Split nodes into those before the residual ones, these, and those after.

    Raises:
        ConfigError: what is between residual nodes, or attends outside of them, is no part of a block.
    """
    residual = [index for index, node in enumerate(nodes) if isinstance(node, ResidualTopology)]
    first, end = (residual[0], residual[-1] + 1) if residual else (0, 0)
    for index, node in enumerate(nodes):
        is_inside = first <= index < end
        if is_inside != isinstance(node, ResidualTopology) or (not is_inside and _attends(node)):
            raise ConfigError(
                f"early exit: node {index} of the topology is a {type(node).__name__}, where the blocks of a model "
                "that can be left early are residual: its end cannot read what blocks before it put out; use "
                "spec_method=lookup, or draft with a smaller model"
            )
    return nodes[:first], nodes[first:end], nodes[end:]


def _attends(node: nn.Module) -> bool:
    return next(attention_applications(node), None) is not None
