"""Gradient clipping by norm or value: one pass for all norms, one per group for scaling; what is not finite."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from caramba.config.train import PhaseConfig
from caramba.errors import CarambaError
from caramba.ops import has_kernel
from caramba.ops.foreach_norm import foreach_norm
from caramba.optim.adamw import AdamW
from caramba.optim.groups import complete_squares, is_sharded, local, sum_over_ranks
from caramba.runs.events import append_event
from caramba.runs.files import write_json

NONFINITE = "nonfinite.json"
MOST_SKIPPED_IN_A_ROW = 20


class Deferred:
    """Values that are copied to the host; `read` waits for them, and not for later work.

    Off CUDA nothing is copied before `read`: the tensors are the caller's to leave alone until then.
    """

    def __init__(self, *values: Tensor) -> None:
        self._values = [value.detach() for value in values]
        self._is_here: torch.cuda.Event | None = None
        if values[-1].is_cuda:
            self._values = [value.to("cpu", non_blocking=True) for value in self._values]
            self._is_here = torch.cuda.Event()
            self._is_here.record(torch.cuda.current_stream(values[-1].device))

    @property
    def is_underway(self) -> bool:
        """Whether `read` might have to wait for a device."""
        return self._is_here is not None

    def read(self) -> list[float]:
        """Return all elements of the values in order."""
        if self._is_here is not None:
            self._is_here.synchronize()
        return [x for value in self._values for x in value.flatten().tolist()]


class NonFiniteWatch:
    """Check the loss and gradient norm of every optimiser step by the phase's `nonfinite`.

    `stop` writes the step, its loss and norm, and the windows of its batch to nonfinite.json, and raises. On a CUDA
    device it reads a step's values while the next step runs, to avoid synchronising; a save waits for them. `skip`
    synchronises at every step, skips the step and writes the event `step_skipped`. All ranks decide alike; one
    `writes`.
    """

    def __init__(
        self,
        phase: PhaseConfig,
        run_dir: Path,
        name: str,
        windows_of: Callable[[int], Sequence[int]],
        *,
        writes: bool = True,
    ) -> None:
        self.writes = writes
        self.phase, self.run_dir, self.name, self.windows_of = phase, run_dir, name, windows_of
        self.skipped, self._in_a_row = 0, 0
        self._unread: tuple[int, Deferred] | None = None

    def allows(self, step: int, loss: Tensor, norm: Tensor) -> bool:
        """Return whether the weights may take optimiser step `step` (0-based).

        Raises:
            CarambaError: by `stop` at this step or the one before; by `skip` after twenty steps in a row.
        """
        self.flush()
        seen = Deferred(loss, norm)
        if self.phase.nonfinite == "stop" and seen.is_underway:
            self._unread = step, seen
            return True
        value, size = seen.read()
        if math.isfinite(value) and math.isfinite(size):
            self._in_a_row = 0
            return True
        if self.phase.nonfinite == "stop":
            raise self._stop(step, value, size)
        self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
        if self.writes:
            append_event(self.run_dir, "step_skipped", **self._record(step, value, size))
        if self._in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise self._stop(step, value, size, before=f"{self._in_a_row} steps in a row were skipped, and ")
        return False

    def flush(self) -> None:
        """Read the step that was not read yet.

        Raises:
            CarambaError: its loss or gradient is not finite.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            step, seen = unread
            value, size = seen.read()
            if not (math.isfinite(value) and math.isfinite(size)):
                raise self._stop(step, value, size)

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]

    def _record(self, step: int, loss: float, norm: float) -> dict[str, object]:
        return {
            "phase": self.name,
            "step": step + 1,
            "loss": loss if math.isfinite(loss) else str(loss),
            "grad_norm": norm if math.isfinite(norm) else str(norm),
            "block_size": self.phase.block_size,
            "windows": list(self.windows_of(step)),
        }

    def _stop(self, step: int, loss: float, norm: float, before: str = "") -> CarambaError:
        path = self.run_dir / NONFINITE
        if self.writes:
            write_json(path, self._record(step, loss, norm))
        leave_out = ", or leave such steps out with nonfinite=skip" if self.phase.nonfinite == "stop" else ""
        return CarambaError(
            f"{self.name}: {before}the loss is {loss:g} and the gradient's norm {norm:g} at step {step + 1}; the "
            f"last saved state is as it was, and the windows of the batch are in {path}; lower lr (now "
            f"{self.phase.lr}), lengthen warmup_steps, lower max_grad_norm{leave_out}"
        )


EPSILON = 1e-6  # torch's own


@torch.no_grad()
def clip_gradients(
    groups: Iterable[Sequence[nn.Parameter]],
    max_norm: float | None,
    *,
    has_stages: bool = False,
    copies: Sequence[Tensor] = (),
    hand_over: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Clip each group's gradients in place to 2-norm `max_norm`; return the total norm before clipping, [].

    Each group is scaled by min(1, max_norm / (|g| + 1e-6)), like `torch.nn.utils.clip_grad_norm_` on every group but
    with fewer launches and passes. Groups without gradients are ignored; with `max_norm` None nothing is scaled.
    Gradients are on one device, or sharded over ranks, and norms are of the whole. With `has_stages` every rank has
    different parameters in the same number of groups, and norms cover all ranks; `copies` are local parameters that
    another rank counts.
    """
    listed = [[p for p in group if p.grad is not None] for group in groups]
    listed = [group for group in listed if group]
    if not listed:
        return torch.zeros(())
    gradients = [[p.grad for p in group if p.grad is not None] for group in listed]
    every = [grad for group in gradients for grad in group]
    norms = tensor_norms(every)
    if copies:
        elsewhere = {id(copy) for copy in copies}
        counted = [id(p) not in elsewhere for group in listed for p in group]
        norms = norms * torch.tensor(counted, device=norms.device)
    sizes = [len(group) for group in gradients]
    if len(set(sizes)) == 1:  # blocks of one kind: no launch for each of them
        rows = norms.view(len(sizes), sizes[0])
    else:
        # Pad groups of fewer gradients with zeros, which do not change a norm.
        rows = nn.utils.rnn.pad_sequence(list(norms.split(sizes)), batch_first=True)
    totals = torch.linalg.vector_norm(rows, dim=1)
    if has_stages:
        totals = sum_over_ranks(totals.square()).sqrt()
    if max_norm is not None:
        scales = (max_norm / (totals + EPSILON)).clamp(max=1.0)
        if hand_over is not None and len(gradients) == 1:
            hand_over(scales[0])
            return totals[0]
        for group, scale in zip(gradients, scales.unbind(), strict=True):
            torch._foreach_mul_([local(grad) for grad in group], scale)  # pyright: ignore[reportPrivateImportUsage]
    return totals[0] if len(sizes) == 1 else torch.linalg.vector_norm(totals)


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of n tensors in one pass, [n], in at least float32.

    For sharded tensors the norms are of the whole.
    """
    parts = [local(tensor) for tensor in tensors]
    if _has_kernel(parts):
        norms = foreach_norm(parts)
    else:
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in parts) else torch.float32
        norms = torch.stack(torch._foreach_norm(parts, 2, dtype=dtype))  # pyright: ignore[reportPrivateImportUsage]
    if not any(is_sharded(tensor) for tensor in tensors):
        return norms
    return complete_squares(norms.square(), tensors).sqrt()


def _has_kernel(parts: Sequence[Tensor]) -> bool:
    """True if `foreach_norm` has a kernel for these tensors.

    False during CUDA graph capture, which would record addresses.
    """
    first = parts[0]
    if not has_kernel("foreach_norm", first) or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return all(x.is_contiguous() and x.dtype != torch.float64 and x.device == first.device for x in parts)


@torch.no_grad()
def clip_values(
    groups: Iterable[Sequence[nn.Parameter]],
    limit: float,
    *,
    has_stages: bool = False,
    copies: Sequence[Tensor] = (),
) -> Tensor:
    """Clamp every element of the gradients in place to [-limit, limit], and return the norm of all before that, []."""
    listed = [list(group) for group in groups]
    norm = clip_gradients(listed, None, has_stages=has_stages, copies=copies)
    gradients = [local(p.grad) for group in listed for p in group if p.grad is not None]
    if gradients:
        torch._foreach_clamp_max_(gradients, limit)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_clamp_min_(gradients, -limit)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def clipping_step(optimizer: torch.optim.Optimizer) -> AdamW | None:
    """Return the optimiser whose kernel can apply the clip scale while it reads gradients, if any."""
    inner = getattr(optimizer, "fused_inner", optimizer)  # of master weights
    inner = getattr(inner, "inner", inner)  # of a portfolio, the optimiser that steps
    if not isinstance(inner, AdamW):
        return None
    first = next((p for group in inner.param_groups for p in group["params"]), None)
    return inner if first is not None and has_kernel("adamw_step", first) else None


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, scale: Tensor) -> None:
    """Multiply all gradients by `scale`, [], at once or by the optimiser's next step as it reads them."""
    step = clipping_step(optimizer)
    if step is not None:
        step.take_clip(scale if step.clip is None else step.clip * scale)
        return
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if held:
        torch._foreach_mul_([local(grad) for grad in held], scale)  # pyright: ignore[reportPrivateImportUsage]
