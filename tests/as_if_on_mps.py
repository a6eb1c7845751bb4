"""Runs of device=mps on this host: CPU tensors are marked as the device's, and what a Mac would refuse is noted.

A function mode answers `x.device`, takes `device=mps` and copies between devices; a dispatch mode follows marked
storage through every operator, backward passes too. Nothing here stands in for the device's arithmetic.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

MPS, CPU = torch.device("mps", 0), torch.device("cpu")
WIDE = (torch.float64, torch.complex128)
QUESTIONS = ("is_available", "device_count", "is_initialized", "is_bf16_supported")
"""Functions of torch.cuda that any machine may be asked."""
_BETWEEN_DEVICES = ("copy_", "_foreach_copy_", "_to_copy", "index", "index_put_", "set_")


_Generator = torch.Generator


class MpsGenerator(_Generator):
    """A generator that was made for the device; any other is one of torch's own."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator.__new__(cls if torch.device(device).type == "mps" else _Generator)


class Watch:
    """What was seen: operators with a tensor of the device, and findings by kind, operator and line of caramba."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.findings: Counter[tuple[str, str, str]] = Counter()
        self._storages: dict[int, StorageWeakRef] = {}
        self._most = 1024

    def has(self, x: Tensor) -> bool:
        """Whether x is on the device."""
        return x.untyped_storage()._cdata in self._storages

    def mark(self, x: Tensor) -> None:
        """Put x's storage on the device."""
        storage = x.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)
        if len(self._storages) > self._most:
            self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
            self._most = 2 * len(self._storages) + 1024

    def check_generators(self, given: Any, name: str) -> None:
        """Note a generator of the CPU that is to draw on the device."""
        if any(type(x) is _Generator for x in given):
            self.note("generator of the CPU", name)

    def note(self, kind: str, what: str) -> None:
        """Count a finding at the line of caramba that runs."""
        frame = sys._getframe(1)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("caramba"):
            frame = frame.f_back  # type: ignore[assignment]
        where = "backward" if frame is None else f"{frame.f_globals['__name__']}:{frame.f_lineno}"
        self.findings[kind, what, where] += 1


def leaves(*given: Any) -> Iterator[Any]:
    """Yield what lists, tuples and mappings hold: torch's own function for that takes longer than the operators."""
    for x in given:
        if isinstance(x, (list, tuple)):
            yield from leaves(*x)
        elif isinstance(x, dict):
            yield from leaves(*x.values())
        else:
            yield x


def tensors_in(given: Iterable[Any]) -> list[Tensor]:
    return [x for x in given if isinstance(x, Tensor) and x.layout == torch.strided]


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch, name = dict(kwargs or {}), self.watch, getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args, kwargs)
        if func in _MOVES:  # as `to`
            args, func = (*args[:1], _MOVES[func], *args[1:]), Tensor.to
        given = tensors_in(leaves(args, kwargs))
        wanted = self._wanted(func, args, kwargs)
        if func in _TO_HOST and watch.has(args[0]):
            watch.note("host access", name)
        if kwargs.get("pin_memory") or (name == "pin_memory" and watch.has(args[0])):
            watch.note("pinned memory", name)
        if wanted is not None:
            args, kwargs = tree_map(_on_host, (args, kwargs))
        before = {x.untyped_storage()._cdata for x in given}
        found = func(*args, **kwargs)
        if wanted is None:
            if name == "new_tensor" and watch.has(args[0]):
                watch.mark(found)
            return found
        if wanted.type == "mps":
            watch.check_generators(kwargs.values(), name)
        first = given[0] if given else None
        if first is not None and func is Tensor.to and watch.has(first) != (wanted.type == "mps"):
            found = found.clone() if found.untyped_storage()._cdata in before else found
        return tree_map(lambda x: self._place(x, wanted, before), found)

    def _place(self, x: Any, wanted: torch.device, before: set[int]) -> Any:
        if isinstance(x, Tensor) and x.layout == torch.strided:
            storage = x.untyped_storage()._cdata
            if wanted.type == "mps":
                self.watch.mark(x)
                if x.dtype in WIDE:
                    self.watch.note("float64", "a tensor of the device")
            elif storage not in before:
                self.watch._storages.pop(storage, None)
        return x

    def _wanted(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        """Return the device that a call asks for."""
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):
            return MPS if self.watch.has(args[1]) else CPU
        for x in (kwargs.get("device"), *(args[1:] if func is Tensor.to else ())):
            if isinstance(x, torch.device):
                return x
            if isinstance(x, str):
                return torch.device(x)
        return None

    def _attribute(self, func: Any, args: Any, kwargs: Any) -> Any:
        answers = {_DEVICE: MPS, _IS_MPS: True, _IS_CPU: False}
        if func in answers and args[0].layout == torch.strided and self.watch.has(args[0]):
            return answers[func]
        return func(*args, **kwargs)


_DEVICE, _IS_MPS, _IS_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_mps", "is_cpu"))
_MOVES = {Tensor.cpu: CPU, Tensor.cuda: torch.device("cuda")}
_TO_HOST = (Tensor.numpy, Tensor.__array__)


def _on_host(x: Any) -> Any:
    if isinstance(x, torch.device) or (isinstance(x, str) and x.partition(":")[0] == "mps"):
        return CPU if torch.device(x).type == "mps" else x
    return x


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        every = list(leaves(args, kwargs))
        given = tensors_in(every)
        on_device = [x for x in given if watch.has(x)]
        name = func._schema.name.partition("::")[2]
        if on_device:
            watch.operators[name] += 1
            apart = [x for x in given if x.dim() and not watch.has(x)]
            if apart and name not in _BETWEEN_DEVICES:
                watch.note("two devices", name)
            watch.check_generators(every, name)
            if name in ("_pin_memory", "pin_memory"):
                watch.note("pinned memory", name)
        found = func(*args, **kwargs)
        if on_device:
            before = {x.untyped_storage()._cdata for x in given}
            for x in tensors_in(leaves(found)):
                if x.untyped_storage()._cdata not in before:
                    watch.mark(x)
                if x.dtype in WIDE and watch.has(x):
                    watch.note("float64", name)
        return found


def _asked(watch: Watch, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("caramba"):
            watch.note("call of CUDA", name)
        return function(*args, **kwargs)

    return run


def _forget_availability() -> None:
    """Let Lightning, if it is loaded, ask again whether MPS is there: it keeps the first answer of a process."""
    module = sys.modules.get("lightning.fabric.accelerators.mps")
    if module is not None:
        module.MPSAccelerator.is_available.cache_clear()


@contextlib.contextmanager
def as_if_on_mps(memory: int = 2**34) -> Iterator[Watch]:
    """Run a block as if this machine had Apple's GPU with so many bytes; its kernels attach, and references run."""
    from caramba import kernels
    from caramba.ops import backend

    watch = Watch()
    facts = {
        **{"recommended_max_memory": lambda: memory, "driver_allocated_memory": lambda: 0},
        **{"current_allocated_memory": lambda: 0, "synchronize": lambda: None, "empty_cache": lambda: None},
        **{"get_rng_state": lambda: own_state(), "set_rng_state": lambda state: set_own_state(state)},
    }
    autocast, own_state, set_own_state = torch.autocast.__init__, torch.get_rng_state, torch.set_rng_state

    def attach(op: str, kind: str, name: str, launcher: Callable[..., Any]) -> None:
        backend._attached[op, kind], backend.launchers[op, kind] = name, launcher

    def autocast_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "mps" else device_type, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        replace = lambda owner, name, new: stack.enter_context(mock.patch.object(owner, name, new))  # noqa: E731
        for name, answer in facts.items():
            replace(torch.mps, name, answer)
        for name, function in vars(torch.cuda).copy().items():
            is_public = callable(function) and not isinstance(function, type) and not name.startswith("_")
            if is_public and name not in QUESTIONS and getattr(function, "__module__", "").startswith("torch.cuda"):
                replace(torch.cuda, name, _asked(watch, name, function))
        replace(torch.backends.mps, "is_available", lambda: True)
        replace(platform, "processor", lambda: "arm")
        replace(torch, "Generator", MpsGenerator)
        replace(torch.autocast, "__init__", autocast_on_cpu)
        replace(kernels, "METAL_AVAILABLE", True)
        replace(kernels, "attach", attach)
        for held in (backend._attached, backend.launchers):
            stack.enter_context(mock.patch.dict(held))
        _forget_availability()
        stack.callback(_forget_availability)
        stack.enter_context(_Operators(watch))
        stack.enter_context(_Functions(watch))
        yield watch
