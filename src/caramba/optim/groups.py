"""Parameters as optimisers see them: which decay, which are matrices of the stack, and which ranks share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caramba.errors import ConfigError

Named = tuple[str, nn.Parameter]
OUTSIDE_THE_STACK = ("embedder", "head")
LR_MULT = "lr_mult"
"""Key of a group: what its learning rate is, as a multiple of the schedule's. Without it 1."""


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to norms, biases, gates and embeddings."""
    return parameter.ndim >= 2 and "embedder" not in name.split(".")


def is_stack_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix between features of the stack, which has singular values worth levelling:
    neither an embedding nor the head, whose rows stand for tokens."""
    return parameter.ndim == 2 and not set(name.split(".")) & set(OUTSIDE_THE_STACK)


def parameter_groups(
    named: Iterable[Named], weight_decay: float, lr_mult: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Return an optimiser's groups: parameters that decay, then those that do not; none of them empty.

    With `lr_mult`, multiples of the learning rate by pattern of names, each multiple has groups of its own, in rising
    order; the last pattern that matches a name holds, and 1 where none does. A group's key `lr_mult` has it.
    """
    found: dict[float, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
    for name, value in named:
        factor = lr_factor(name, lr_mult or {})
        decayed, others = found.setdefault(factor, ([], []))
        (decayed if decays(name, value) else others).append(value)
    groups: list[dict[str, Any]] = []
    for factor, (decayed, others) in sorted(found.items()):
        own = {LR_MULT: factor} if lr_mult else {}
        groups += [
            {"params": decayed, "weight_decay": weight_decay, **own},
            {"params": others, "weight_decay": 0.0, **own},
        ]
    return [group for group in groups if group["params"]]


def lr_factor(name: str, lr_mult: Mapping[str, float]) -> float:
    """Return the multiple of the learning rate of a parameter: that of the last pattern that matches, else 1."""
    return next((factor for pattern, factor in reversed(list(lr_mult.items())) if fnmatchcase(name, pattern)), 1.0)


def check_lr_mult(names: Iterable[str], lr_mult: Mapping[str, float]) -> None:
    """Check that every pattern of `train.lr_mult` matches a parameter.

    Raises:
        ConfigError: a pattern that matches none.
    """
    known = list(names)
    for pattern in lr_mult:
        if not any(fnmatchcase(name, pattern) for name in known):
            some = ", ".join(known[:2])
            raise ConfigError(
                f"train.lr_mult: got the pattern {pattern!r}, expected one that matches a parameter, such as {some}; "
                "change or remove it"
            )


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of an optimiser's step returns, called with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked without importing what defines it."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is on this rank, which shares its memory; of a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def complete_squares(squares: Tensor, tensors: Sequence[Any]) -> Tensor:
    """Return the sums of squares of whole tensors, [n], from those of the parts here, [n].

    A dimension of the mesh over which a tensor is the same everywhere adds nothing. Ranks have the same tensors in the
    same order.
    """
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if not is_sharded(tensor):
            continue
        for dim, placement in enumerate(tensor.placements):
            if not placement.is_replicate() and tensor.device_mesh.size(dim) > 1:
                places.setdefault((tensor.device_mesh, dim), []).append(place)
    for (mesh, dim), own in places.items():
        index = torch.tensor(own, device=squares.device)
        part = squares[index]
        dist.all_reduce(part, group=mesh.get_group(dim))
        squares = squares.index_copy(0, index, part)
    return squares


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of every rank's values, on all ranks, in place."""
    dist.all_reduce(values)
    return values


def of_rank_0(value: Tensor) -> Tensor:
    """Return rank 0's value on all ranks, in place, without waiting for the device."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(value, src=0)
    return value


@torch.no_grad()
def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, made by one launch where they have one dtype."""
    found = [torch.empty_like(x) for x in tensors]
    if found:
        torch._foreach_copy_(found, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return found
