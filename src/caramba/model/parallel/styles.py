"""How each kind of layer is split over ranks, one `ParallelStyle` each, and local parts as plain tensors."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from caramba.config.parallel_check import dims_of_rank
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer, Documents
from caramba.layer.latent import LatentProjection
from caramba.layer.rope import RotaryEmbedding
from caramba.layer.score import CausalScore
from caramba.model.parallel.collectives import (
    all_gather_vocab,
    copy_to_region,
    gather_sequence,
    reduce_from_region,
    scatter_sequence,
)


def split_parameters(
    module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int], shared: Collection[str] = ()
) -> None:
    """Replace a module's direct parameters by DTensors on `mesh`; its forward reads this rank's shard.

    Names do not change in `parameters()` and the state dict. Layers still compute with plain tensors, so kernels,
    compilation and caches work as on one device.

    Args:
        dims: split dimension of each parameter by name; other parameters are replicated.
        shared: replicated parameters that each rank uses for a part of the work: their gradients are summed.
    """
    rank, n_ranks = mesh.get_local_rank(), mesh.size()
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = dims.get(name)
        own = parameter.detach() if dim is None else parameter.detach().chunk(n_ranks, dim)[rank].clone()
        placement = Replicate() if dim is None else Shard(dim)
        whole = DTensor.from_local(own, mesh, [placement], run_check=False)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    names = tuple(sorted(module._parameters))
    add_mixin(module, _local_mixin(names), share=RankShare(mesh.get_group(), frozenset(shared)))


@dataclass(frozen=True)
class RankShare:
    """The process group that shares a module's work, and its parameters whose gradients are summed."""

    group: dist.ProcessGroup
    summed: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankShare":
        return self  # a copied model belongs to the same ranks


def add_mixin(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Put a mixin before a module's class, and set plain attributes."""
    module.__dict__.update(attributes)
    module.__class__ = _mixed(mixin, type(module))


def rank_share(module: nn.Module) -> RankShare:
    """Return the RankShare that `split_parameters` stored on a module."""
    return module.__dict__["share"]


@functools.cache  # equal layers are of one class, so that compiled code serves all of them
def _mixed(mixin: type, base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__.lstrip('_')}{base.__name__}", (mixin, base), {})


@functools.cache
def _local_mixin(names: tuple[str, ...]) -> type:
    """Return a mixin with properties that read the local shards of these parameters."""
    return type("Local", (), {name: property(_local_reader(name)) for name in names})


def _local_reader(name: str) -> Callable[[nn.Module], Tensor | None]:
    def read(self: nn.Module) -> Tensor | None:
        value = self._parameters[name]
        # On a mesh of several dimensions it is FSDP's sharded state between forwards, not a layer's shard.
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value
        local, share = value.to_local(), rank_share(self)
        return copy_to_region(local, share.group) if name in share.summed else local

    return read


def keep_local(module: nn.Module) -> None:
    """Replace every DTensor parameter by this rank's shard as a frozen plain parameter, for inference.

    Quantisation and captured steps then read the same tensors as the forward.
    """
    for one in module.modules():
        for name, parameter in list(one.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                one.register_parameter(name, nn.Parameter(parameter.to_local().detach(), requires_grad=False))


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return unsharded weights and buffers with single-process names and shapes. Every rank must call it."""
    with torch.no_grad():
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in module.state_dict().items()
        }


@contextlib.contextmanager
def rank_rng(device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """Use a separate random stream for this rank on `device`, and restore the shared one on exit.

    Equally seeded ranks stay in step: all draw the same seeds on the host, without synchronising, and each uses its
    own. Activation checkpointing restores the shared stream, so recomputation draws the same numbers.
    """
    seeds = torch.randint(2**63 - 1, (dist.get_world_size(group),))
    streams = torch if device.type == "cpu" else torch.get_device_module(device)
    before = streams.get_rng_state()
    streams.manual_seed(int(seeds[dist.get_rank(group)]))
    try:
        yield
    finally:
        streams.set_rng_state(before)


def use_rank_dropout(score: CausalScore) -> None:
    """Give each rank's heads separate attention dropout.

    Such an attention is excluded from compilation, because the host changes the random stream.
    """
    if score.dropout > 0:
        add_mixin(score, _dropout_mixin())


def _attend(self: Any, q: Tensor, *rest: Any) -> Tensor:
    if not self.training:
        return CausalScore.forward(self, q, *rest)
    with rank_rng(q.device, rank_share(self).group):
        return CausalScore.forward(self, q, *rest)


@functools.cache
def _dropout_mixin() -> type:
    # Created on first use: this imports torch's compiler, which most processes do not need.
    return type("OwnDropout", (), {"forward": torch.compiler.disable(_attend)})


OF_QUERY_HEADS = (
    "q",
    "q_sem",
    "q_geo",
    "gate",
    "gate_dynamic",
    "temperature",
    "q_sem_map",
    "q_geo_map",
    "v_up",
)
OF_KEY_HEADS = ("k", "k_sem", "k_geo", "v", "null_k", "null_v", "first.k", "first.v", "first.key_mean")
OF_ALL_HEADS = (
    "q_norm",
    "k_norm",
    "q_sem_norm",
    "k_sem_norm",
    "q_geo_norm",
    "k_geo_norm",
    "null_c",
    "null_geo",
)
"""Attention parameters, or modules that own them, by owner; per-head parameters are ordered head by head."""


class Replicated(ParallelStyle):
    """Every rank computes the whole layer; with `by_sequence`, on its own tokens only."""

    def __init__(self, *, by_sequence: bool = False) -> None:
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for one in module.modules():
            names = [name for name, _ in one.named_parameters(recurse=False)]
            split_parameters(one, device_mesh, {}, names if self.by_sequence else ())
        return module


class SequenceParallel(ParallelStyle):
    """Sequence parallelism for a topology: layers between split ones see this rank's tokens only.

    Reference: Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameters(module, device_mesh, {})
        add_mixin(module, _ScatterTokens)
        return module


class HeadParallel(ParallelStyle):
    """Attention split by heads. Keys and values shared by all heads are computed and cached on every rank.

    These are the latent and geometric key of a latent layer, or the one head of multi-query attention. One all-reduce
    sums the ranks' outputs. Dropout uses separate random numbers per rank.

    Reference: Shoeybi et al., 2019, arXiv:1909.08053, section 3.
    """

    def __init__(self, *, by_sequence: bool = False) -> None:
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, AttentionLayer)
        rank, n_ranks = device_mesh.get_local_rank(), device_mesh.size()
        whole, own = module.dims, dims_of_rank(module.dims, n_ranks, module.config.is_latent)
        names = _splits_by_head(module, splits_keys=own.n_kv_heads < whole.n_kv_heads)
        for path, one in list(module.named_modules()):
            if path == "out":
                _split_rows(one, device_mesh, by_sequence=self.by_sequence)
                continue
            mine = [name for name, _ in one.named_parameters(recurse=False)]
            split = {name: 0 for name in mine if names[f"{path}.{name}" if path else name]}
            split_parameters(one, device_mesh, split, [name for name in mine if name not in split])
            if isinstance(one, RotaryEmbedding) and len(one.inv_freq) == whole.n_kv_heads > own.n_kv_heads:
                add_mixin(one, _HeadSlice, heads=(rank * own.n_kv_heads, own.n_kv_heads))
        use_rank_dropout(module.score)
        module.dims = module.projection.dims = own
        if isinstance(module.projection, LatentProjection) and module.projection.first is not None:
            module.projection.first.n_kv_heads = own.n_kv_heads
        add_mixin(module, _GatherInput if self.by_sequence else _RegionInput)
        return module


class GatedMLPParallel(ParallelStyle):
    """Gated MLP split by its d_ff features, with one all-reduce of the outputs."""

    def __init__(self, *, by_sequence: bool = False) -> None:
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in ("gate", "up"):
            split_parameters(module.get_submodule(name), device_mesh, {"weight": 0, "bias": 0})
        _split_rows(module.get_submodule("down"), device_mesh, by_sequence=self.by_sequence)
        split_parameters(module, device_mesh, {})
        add_mixin(module, _GatherInput if self.by_sequence else _RegionInput)
        return module


class VocabParallelEmbedding(ParallelStyle):
    """Token embedding split by vocabulary entries: other tokens give zero, and results are all-reduced."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameters(module, device_mesh, {"weight": 0})
        assert isinstance(module, nn.Embedding)
        first = device_mesh.get_local_rank() * (module.num_embeddings // device_mesh.size())
        add_mixin(module, _VocabParallel, first_entry=first)
        return module


class VocabParallelHead(ParallelStyle):
    """Head split by vocabulary entries: logits are all-gathered, without a gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameters(module, device_mesh, {"weight": 0, "bias": 0})
        add_mixin(module, _GatherLogits)
        return module


def _splits_by_head(attention: AttentionLayer, *, splits_keys: bool) -> dict[str, bool]:
    """Return for every parameter except those of `out` whether ranks split it by heads, on dimension 0.

    Raises:
        ConfigError: a parameter that no head is known to own.
    """
    of_all = OF_ALL_HEADS + (("c", "k_geo") if attention.config.is_latent else ())
    found: dict[str, bool] = {}
    for name, _ in attention.named_parameters():
        owner = name.removeprefix("projection.").removesuffix(".weight").removesuffix(".bias")
        if owner == "out":
            continue
        if owner in of_all:
            found[name] = False
        elif owner in OF_QUERY_HEADS:
            found[name] = True
        elif owner in OF_KEY_HEADS:
            found[name] = splits_keys
        else:
            raise ConfigError(
                f"tensor parallel: no plan for {name} of {type(attention).__name__}; split the model before it is "
                "adapted or quantised, or run it on one device"
            )
    return found


def _split_rows(linear: nn.Module, mesh: DeviceMesh, *, by_sequence: bool) -> None:
    split_parameters(linear, mesh, {"weight": 1}, ("bias",) if by_sequence else ())
    add_mixin(linear, _RowParallelScatter if by_sequence else _RowParallel)


class _RegionInput:
    def forward(self: Any, x: Tensor, *rest: Any) -> Tensor:
        return super().forward(copy_to_region(x, rank_share(self).group), *rest)  # pyright: ignore[reportAttributeAccessIssue]


class _GatherInput:
    def forward(self: Any, x: Tensor, *rest: Any) -> Tensor:
        return super().forward(gather_sequence(x, rank_share(self).group, is_summed=True), *rest)  # pyright: ignore[reportAttributeAccessIssue]


class _ScatterTokens:
    def forward(self: Any, x: Tensor, ctx: Any = None) -> Tensor:
        group = rank_share(self).group
        is_cached = not (ctx is None or isinstance(ctx, Documents))
        if x.shape[1] % group.size() or is_cached:
            got = f"{x.shape[1]} tokens{' and a cache' if is_cached else ''}"
            raise ConfigError(
                f"tensor parallel: {group.size()} ranks split sequences, got {got}; expected a multiple of "
                f"{group.size()} and no cache: change block_size, or split the model without split_sequence"
            )
        own = super().forward(scatter_sequence(x, group, is_summed=False), ctx)  # pyright: ignore[reportAttributeAccessIssue]
        return gather_sequence(own, group, is_summed=False)


class _RowParallel:
    def forward(self: Any, input: Tensor) -> Tensor:
        total = self.total(F.linear(input, self.weight), rank_share(self).group)
        bias = self.bias
        return total if bias is None else total + bias.to(total.dtype)

    def total(self, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce_from_region(part, group)


class _RowParallelScatter(_RowParallel):
    def total(self, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return scatter_sequence(part, group, is_summed=True)


class _HeadSlice:
    def forward(self: Any, *position: Any) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(*position)  # pyright: ignore[reportAttributeAccessIssue]
        return cos.narrow(-3, *self.heads), sin.narrow(-3, *self.heads)


class _VocabParallel:
    def forward(self: Any, input: Tensor) -> Tensor:
        weight = self.weight
        own = input - self.first_entry
        is_mine = (own >= 0) & (own < len(weight))
        rows = F.embedding(own.clamp(0, len(weight) - 1), weight)
        return reduce_from_region(rows * is_mine[..., None], rank_share(self).group)


class _GatherLogits:
    def forward(self: Any, input: Tensor, token_weight: Tensor) -> Tensor:
        return all_gather_vocab(super().forward(input, token_weight), rank_share(self).group)  # pyright: ignore[reportAttributeAccessIssue]
