"""Captures what chosen modules return during forwards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from caramba.errors import ConfigError

COMPILED = "_orig_mod"


def _is_recomputing() -> bool:
    """Whether a backward pass is running, in which a forward can only be activation checkpointing's second one."""
    # The compiler unrolls checkpointing itself and cannot trace the question.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class TraceRecord:
    """One call of a traced module: its qualified name, its output, and its first positional input when
    kept."""

    name: str
    output: Any
    input: Any = None


class Trace:
    """Context manager that records the calls of the modules that a predicate accepts, in execution order.

        with Trace(model, lambda name, module: isinstance(module, AttentionLayer)) as trace:
            model(tokens)
        first, *others = trace.outputs
        trace.last("topology.layers.0.layers.1")

    Shared weights that run n times in one forward give n records. With `detach` (the default) records carry
    no graph. Hooks are removed when the block ends, however it ends; what was recorded stays.

    Under activation checkpointing each call is recorded once, in the forward, and not again when backward runs
    it a second time. The reentrant kind runs that forward without a graph, so `detach=False` has nothing to
    follow there.

    Under torch.compile the hooks become part of the compiled code, which does not look for new ones: enter the
    block before the model's first compiled call, or call `torch.compiler.reset()` in it. Names are those of the
    uncompiled model. Code that was compiled inside a block records nothing after it.

    Raises:
        ConfigError: on entry, when the predicate accepts no module, or the trace is open already.
    """

    def __init__(
        self,
        model: nn.Module,
        predicate: Callable[[str, nn.Module], bool],
        *,
        detach: bool = True,
        keep_inputs: bool = False,
    ) -> None:
        self.records: list[TraceRecord] = []
        self.names: tuple[str, ...] = ()
        self._model = model
        self._predicate = predicate
        self._detach = detach
        self._keep_inputs = keep_inputs
        self._handles: list[RemovableHandle] = []
        self._is_open = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise ConfigError("trace: this trace is open already; make another Trace for a block inside it")
        # A compiled module holds the original as `_orig_mod`; the last of both names is the original.
        modules = {
            ".".join(part for part in name.split(".") if part != COMPILED): module
            for name, module in self._model.named_modules()
        }
        self.names = tuple(name for name, module in modules.items() if self._predicate(name, module))
        if not self.names:
            raise ConfigError(
                f"trace: the predicate accepts none of the {len(modules)} modules of "
                f"{type(self._model).__name__}; compare it with model.named_modules()"
            )
        self._is_open = True
        self._handles = [modules[name].register_forward_hook(self._hook(name)) for name in self.names]
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_open = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def outputs(self) -> list[Any]:
        """Outputs of all traced calls, in execution order."""
        return [record.output for record in self.records]

    @property
    def inputs(self) -> list[Any]:
        """First inputs of all traced calls, in execution order; empty unless `keep_inputs`."""
        return [record.input for record in self.records] if self._keep_inputs else []

    def last(self, name: str) -> Any:
        """Return the latest output of the module `name`.

        Raises:
            ConfigError: the module is not traced or has not run.
        """
        for record in reversed(self.records):
            if record.name == name:
                return record.output
        traced = ", ".join(self.names)
        raise ConfigError(f"trace: no output of {name!r}; trace a module that runs, these are traced: {traced}")

    def clear(self) -> None:
        """Forget what was recorded, to free memory between batches."""
        self.records.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # Compiled code outlives the block; it is guarded on this flag.
            if not self._is_open or _is_recomputing():
                return
            kept = self._kept(args[0]) if self._keep_inputs and args else None
            self.records.append(TraceRecord(name, self._kept(output), kept))

        return record

    def _kept(self, value: Any) -> Any:
        if not self._detach:
            return value
        if isinstance(value, Tensor):
            return value.detach()
        if isinstance(value, tuple | list):
            return type(value)(self._kept(item) for item in value)
        if isinstance(value, dict):
            return {key: self._kept(item) for key, item in value.items()}
        return value
