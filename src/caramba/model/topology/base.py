"""Base class of topologies: a list of nodes, and how often a forward runs through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.config.topology import TopologyConfig
from caramba.layer.attention import AttentionLayer
from caramba.layer.cpu_decode import Chain, CpuDecodeStep, NormStep, takes_step
from caramba.layer.documents import Documents
from caramba.layer.small_batch import has_hooks
from caramba.model.topology.build import build_nodes, own_config


class Topology(nn.Module):
    """A module that runs other modules. `passes` is how many times one forward runs through `layers`.

    Every node is called as node(x, ctx) in a fixed order, the same in each forward: caches are handed out by
    it.
    """

    passes: int = 1

    def __init__(self, config: TopologyConfig) -> None:
        super().__init__()
        self.layers = build_nodes(config.layers)
        self.fast_path: CpuDecodeStep | None = None  # inside a block of `fuse_linears`, where there is one

    def decode_fast_path(self) -> CpuDecodeStep | None:
        """Return a faster CPU forward for one token, or None to run the nodes."""
        return None

    def run_fast_path(self, x: Tensor, ctx: Context | DeviceContext | Documents | None) -> Tensor | None:
        """Run `fast_path` on one cached token; return None if there is none or it does not apply."""
        step = self.fast_path
        if step is None or not isinstance(ctx, Context) or not takes_step(step, x):
            return None
        return step(x.view(x.shape[0], -1), ctx).view(x.shape)

    def run(self, x: Tensor, ctx: Context | DeviceContext | Documents | None) -> Tensor:
        """Run the list once, each node on the output of the one before."""
        for layer in self.layers:
            x = layer(x, ctx)
        return x


def chain_fast_paths(nodes: Iterable[nn.Module]) -> CpuDecodeStep | None:
    """Return a decode fast path that runs the nodes in order, or None.

    None if a node has no fast path, has hooks, or has an overridden forward.
    """
    steps: list[CpuDecodeStep] = []
    for node in nodes:
        found = node.decode_fast_path() if isinstance(node, Topology) else NormStep.of(node)
        if found is None or has_hooks(node):
            return None
        steps.append(found)
    return Chain(steps) if steps else None


def applications(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, layer) for every attention or custom-layer application, in execution order.

    Shared weights that run several times appear as many times. Layers inside a custom layer are not listed.
    """
    if isinstance(module, AttentionLayer) or own_config(module) is not None:
        yield name, module
        return
    for _ in range(module.passes if isinstance(module, Topology) else 1):
        for child_name, child in module.named_children():
            yield from applications(child, f"{name}.{child_name}" if name else child_name)


def attention_applications(module: nn.Module, name: str = "") -> Iterator[tuple[str, AttentionLayer]]:
    """Yield (qualified name, layer) for every attention application of one forward, in execution order.

    Shared weights that run several times appear as many times.
    """
    for found, layer in applications(module, name):
        if isinstance(layer, AttentionLayer):
            yield found, layer
