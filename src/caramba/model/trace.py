"""Captures what chosen modules return during forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from caramba.errors import ConfigError


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
    no graph. Hooks are removed when the block ends, however it ends; what was recorded stays. Hooks do not
    fire in a module that was compiled before the block began.

    Raises:
        ConfigError: on entry, when the predicate accepts no module.
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

    def __enter__(self) -> Self:
        modules = dict(self._model.named_modules())
        self.names = tuple(name for name, module in modules.items() if self._predicate(name, module))
        if not self.names:
            raise ConfigError(
                f"trace: the predicate accepts none of the {len(modules)} modules of "
                f"{type(self._model).__name__}; compare it with model.named_modules()"
            )
        self._handles = [modules[name].register_forward_hook(self._hook(name)) for name in self.names]
        return self

    def __exit__(self, *exception: object) -> None:
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
        raise ConfigError(
            f"trace: no output of {name!r}; trace a module that runs, these are traced: {traced}"
        )

    def clear(self) -> None:
        """Forget what was recorded, to free memory between batches."""
        self.records.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            kept = self._kept(args[0]) if self._keep_inputs else None
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
