"""Gradients of ranks that hold the same weights, averaged in place while backward runs."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager  # pyright: ignore[reportPrivateUsage]

from caramba.errors import CarambaError

# By its name since torch 2.13; the older one warns there, and is all there is before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class EmbeddingGradRows:
    """Keeps, while `is_kept`, the gradients of what a table gave, which its weight then gets no gradient for.

    Replaces the table's forward until `remove`. Every rank reads equally many tokens.

    Args:
        table: without options of its own (`takes_rows`).
        is_tied: whether the weight takes gradients elsewhere besides.
    """

    def __init__(self, table: nn.Embedding, *, is_tied: bool) -> None:
        self.table, self.is_tied, self.is_kept = table, is_tied, False
        self.kept: list[tuple[Tensor, Tensor]] = []
        # Through the weight itself backward would wait for the table with what a head has for it.
        self._anchor = torch.zeros((), device=table.weight.device, requires_grad=True)
        self._before = table.__dict__.get("forward")
        table.forward = self._look_up

    def expect(self, tokens: int) -> bool:
        """Decide whether rows are kept of a step whose last micro-batch has so many tokens on every rank.

        They are where gathering them moves at most two thirds of what a sum of tables does, and where nothing but a
        head's part would be left in the weight's own gradient.
        """
        self.kept.clear()
        is_alone = self.is_tied or self.table.weight.grad is None
        self.is_kept = is_alone and 3 * tokens * dist.get_world_size() <= 4 * self.table.num_embeddings
        return self.is_kept

    @torch.no_grad()
    def add_mean(self, narrow: torch.dtype | None = None) -> None:
        """Add the mean of the kept rows over all ranks to the weight's gradient, bit-equal on all ranks.

        Args:
            narrow: dtype that rows are sent in; None leaves theirs.

        Raises:
            CarambaError: backward has not reached the table.
        """
        if not self.is_kept:
            return
        if not self.kept:
            raise CarambaError("an embedding had no gradient in a step, and its mean cannot be taken: freeze it")
        weight = self.table.weight
        ids = torch.cat([ids for ids, _ in self.kept])
        rows = torch.cat([rows for _, rows in self.kept]).to(narrow or weight.dtype)
        self.kept.clear()
        self.is_kept = False
        rows /= dist.get_world_size()
        every = _gathered(rows).to(weight.dtype)
        # It sorts by row and sums in that order: sums of ranks that differ would part their weights.
        whole = torch.ops.aten.embedding_dense_backward(every, _gathered(ids), len(weight), -1, False)
        weight.grad = whole if weight.grad is None else weight.grad.add_(whole)

    def remove(self) -> None:
        """Leave the table as it was."""
        self.kept.clear()
        if self._before is None:
            self.table.__dict__.pop("forward", None)
        else:
            self.table.forward = self._before

    def _look_up(self, input: Tensor) -> Tensor:
        if not (self.is_kept and torch.is_grad_enabled()):
            return nn.functional.embedding(input, self.table.weight)
        return _KeptRows.apply(self._anchor, input, self.table.weight.detach(), self.kept)


def takes_rows(table: nn.Module) -> bool:
    """Whether a module is an embedding whose gradient is the sum of its rows' and nothing else."""
    return (
        type(table) is nn.Embedding
        and table.weight.requires_grad
        and table.padding_idx is None
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not table.sparse
    )


class _KeptRows(torch.autograd.Function):
    """Looks rows up; backward keeps (ids [N], gradients [N, M]) in a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, weight: Tensor, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.ids, ctx.kept = ids, kept
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.kept.append((ctx.ids.flatten(), gradients[0].flatten(0, -2)))
        return None, None, None, None


def _gathered(tensor: Tensor) -> Tensor:
    whole = tensor.new_empty(dist.get_world_size() * len(tensor), *tensor.shape[1:])
    _all_gather(whole, tensor.contiguous())
    return whole


AHEAD = 2
"""Maximum groups in flight on a CPU: each may hold a narrow copy."""


class BucketAllReduce:
    """Replaces groups of tensors by their means over all ranks, one all-reduce a group, while other work runs.

    Every rank begins the same groups in the same order. The tensors of a group are of one dtype, contiguous, on this
    rank's device, and neither read nor written nor freed between `begin` and `wait`. On a GPU both calls return at
    once: exchanges run in a stream of their own, and work queued after `wait` reads the means.

    Args:
        narrow: what sums are made in, a dtype of fewer bytes than the tensors'; None leaves theirs.
    """

    def __init__(self, device: torch.device, narrow: torch.dtype | None = None) -> None:
        self.device, self.narrow = device, narrow
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: deque[tuple[Any, Tensor | None, list[Tensor]]] = deque()

    @torch.no_grad()
    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begin the exchange of a group."""
        if self.stream is None:
            while len(self._pending) >= AHEAD:
                self._end_first()
            self._send(list(tensors))
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):  # which waits in place of the host, and owns narrow copies
            self._send(list(tensors))
            self._end_first()

    @torch.no_grad()
    def wait(self) -> None:
        """Have the means of all groups that were begun."""
        while self._pending:
            self._end_first()
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def forget(self) -> None:
        """Let go of groups that were begun, in a step that failed: their ranks may never answer."""
        self._pending.clear()

    def _send(self, tensors: list[Tensor]) -> None:
        flat = None
        sent = tensors
        if self.narrow is not None:
            flat = torch.empty(sum(map(torch.numel, tensors)), dtype=self.narrow, device=self.device)
            torch._foreach_copy_(_parts(flat, tensors), tensors)  # pyright: ignore[reportPrivateImportUsage]
            sent = [flat]
        if self.stream is None:  # gloo has sums alone; divided first, none of them is larger than its terms
            torch._foreach_div_(sent, float(dist.get_world_size()))  # pyright: ignore[reportPrivateImportUsage]
        op = dist.ReduceOp.SUM if self.stream is None else dist.ReduceOp.AVG
        with _coalescing_manager(async_ops=True) as work:
            for tensor in sent:
                dist.all_reduce(tensor, op=op)
        self._pending.append((work, flat, tensors))

    def _end_first(self) -> None:
        work, flat, tensors = self._pending.popleft()
        work.wait()
        if flat is not None:
            torch._foreach_copy_(tensors, _parts(flat, tensors))  # pyright: ignore[reportPrivateImportUsage]


def _parts(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


Missing = Literal["refuse", "zeros", "leave"]


class GradientAverage:
    """Replaces the gradients of a step by their means over all ranks.

    Parameters are taken in groups from the last to the first, as backward reaches them. A group is exchanged once all
    its gradients are there and the groups before it have been: ranks may come to their gradients in any order, and all
    begin the same exchanges in the same order. What backward has left out follows in `finish`, before which nothing
    else may go between ranks, for they may be at different groups.

    Args:
        named: what trains, with names; on every rank the same, in the same order.
        group_bytes: of gradients that are exchanged at once. A larger one is a group of its own.
        narrow: what sums are made in, a dtype of fewer bytes than the gradients'; None leaves theirs.
        missing: of a weight without a gradient on this rank: `refuse` it, count `zeros` where another rank has one, or
            `leave` it out, where all ranks have gradients of the same weights.
        in_backward: whether a step has one backward alone after `expect`, so that gradients are whole when it has made
            them. Otherwise all are exchanged in `finish`.
        rows: an embedding among them whose gradient may be kept as rows, and follows in `finish`; not with `zeros`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        group_bytes: int,
        narrow: torch.dtype | None = None,
        missing: Missing = "refuse",
        in_backward: bool = True,
        rows: EmbeddingGradRows | None = None,
    ) -> None:
        self.names = {id(parameter): name for name, parameter in named}
        every = [parameter for _, parameter in named]
        self._plain = list(bucket_parameters(every, group_bytes))
        self._beside_rows: list[list[nn.Parameter]] = []
        if rows is not None:  # of a tied table a head's part is left, which backward reaches first
            rest = [parameter for parameter in every if parameter is not rows.table.weight]
            first = [[parameter] for parameter in every if parameter is rows.table.weight and rows.is_tied]
            self._beside_rows = [*first, *bucket_parameters(rest, group_bytes)]
        self.missing, self.rows = missing, rows
        device = named[0][1].device if named else torch.device("cpu")
        self.exchange = BucketAllReduce(device, narrow)
        self._arrange(self._plain)
        self._begun = 0
        self._is_expected = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._take) for parameter in (every if in_backward else [])
        ]

    def expect(self, tokens: int) -> None:
        """Say that the next forward, of so many tokens on every rank, and its backward are the last before `finish`."""
        has_rows = self.rows is not None and self.rows.expect(tokens)
        self._arrange(self._beside_rows if has_rows else self._plain)
        self._begun, self._is_expected = 0, bool(self._hooks)

    def finish(self) -> None:
        """Have the mean of every gradient.

        Raises:
            CarambaError: a weight has no gradient, and is to be refused.
        """
        self._is_expected = False
        absent = [one for group in self.groups for one in group if one.grad is None]
        if self.rows is not None and self.rows.is_kept:
            absent = [one for one in absent if one is not self.rows.table.weight]
        if absent and self.missing == "refuse":
            self.exchange.forget()
            names = [self.names[id(one)] for one in absent]
            some = ", ".join(names[:3]) + (" among them" if len(names) > 3 else "")
            raise CarambaError(
                f"{len(names)} weights had no gradient in a step, {some}, and their means over all ranks cannot be "
                "taken: set parallel.find_unused_parameters=true, or freeze them"
            )
        if absent and self.missing == "zeros":
            for one in absent:
                one.grad = torch.zeros_like(one)
        for group in self.groups[self._begun :]:
            self._begin(group)
        self._begun = 0
        self.exchange.wait()
        if self.missing == "zeros":
            self._drop_unused({id(one) for one in absent})
        if self.rows is not None:
            self.rows.add_mean(self.exchange.narrow)

    def remove(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.exchange.forget()
        if self.rows is not None:
            self.rows.remove()

    def _arrange(self, groups: list[list[nn.Parameter]]) -> None:
        self.groups = groups
        self._group_of = {id(one): index for index, group in enumerate(groups) for one in group}
        # of each group, the weights that backward has yet to reach
        self._waiting = [{id(one) for one in group} for group in groups]

    def _take(self, parameter: nn.Parameter) -> None:
        if not self._is_expected:
            return
        index = self._group_of.get(id(parameter))
        if index is None:
            raise CarambaError(
                f"{self.names[id(parameter)]}: it takes gradients besides those of its rows, and would keep its own"
            )
        if index < self._begun:
            raise CarambaError(
                f"{self.names[id(parameter)]}: a gradient came after the mean over all ranks was taken: a step has two "
                "backwards, and gradients are averaged in the first"
            )
        self._waiting[index].discard(id(parameter))
        while self._begun < len(self.groups) and not self._waiting[self._begun]:
            self._begin(self.groups[self._begun])
            self._begun += 1

    def _begin(self, group: list[nn.Parameter]) -> None:
        found = [in_place(one) for one in group if one.grad is not None]
        if found:
            self.exchange.begin(found)

    @torch.no_grad()
    def _drop_unused(self, absent: set[int]) -> None:
        """Take zeros away again where no rank has had a gradient: its weight is not to be decayed."""
        every = [one for group in self.groups for one in group]
        used = torch.tensor([float(id(one) not in absent) for one in every], device=self.exchange.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        if absent:  # the host waits for the device here, and only here
            for one, is_used in zip(every, used.tolist(), strict=True):
                if not is_used:
                    one.grad = None


def bucket_parameters(parameters: Sequence[nn.Parameter], group_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype, from the last to the first, in groups of up to `group_bytes` or of one."""
    group: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        is_full = size + parameter.nbytes > group_bytes or (group and parameter.dtype != group[0].dtype)
        if group and is_full:
            yield group
            group, size = [], 0
        group.append(parameter)
        size += parameter.nbytes
    if group:
        yield group


def in_place(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter that has one; it is contiguous from then on, as exchanges need it."""
    assert parameter.grad is not None
    if not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad
