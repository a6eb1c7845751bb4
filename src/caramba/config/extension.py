"""Nodes of a topology, named by `type`, and extensions: what plugins add besides layers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from caramba.config.base import Config, nearest, refuse_executable
from caramba.config.cost import Cost, Width
from caramba.config.source import is_mapping
from caramba.errors import ConfigError


def load_class(config: ExtensionConfig) -> type:
    """Import the class that an extension's `target` names.

    Raises:
        ConfigError: the import fails, or the class is not of its kind, with the expected signature.
    """
    where = f"{config.key}: {config.type}"
    module, _, name = config.target.partition(":")
    try:
        with types_kept():
            found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(f"{where}: cannot import target {config.target!r}: {user_traceback(error)}") from error
    problem = _problem(config, found)
    if problem is not None:
        raise ConfigError(f"{where}: target {config.target!r} {problem}; expected {config.signature()}")
    return found


def build_extension(config: ExtensionConfig, *arguments: Any) -> Any:
    """Build an extension.

    Raises:
        ConfigError: as `load_class`, or the constructor fails.
    """
    cls = load_class(config)
    try:
        return cls(*arguments)
    except Exception as error:
        raise ConfigError(f"{config.key}: {config.type} cannot be built: {user_traceback(error)}") from error


def _problem(config: ExtensionConfig, found: Any) -> str | None:
    if not isinstance(found, type):
        return "is no class"
    if config.base is not None:
        module, _, name = config.base.partition(":")
        if not issubclass(found, getattr(importlib.import_module(module), name)):
            return f"is no subclass of {name}"
    for method, arguments in config.methods.items():
        function = getattr(found, method, None)
        if function is None:
            return f"has no {method}"
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of C code
            continue
        try:
            signature.bind(None, *arguments)
        except TypeError:
            return f"has {method}{signature}"
    return None


TYPE = "name of the class of this node"
"""Description of the key `type` of every node."""


class NodeConfig(Config):
    """A layer or topology. `target` is "module:Class", resolved only when a model is built, so schemas need no torch.

    A subclass `FooConfig` answers to `type: Foo`. Subclassing registers it, which is how a plugin adds a layer.
    """

    target: ClassVar[str]
    registry: ClassVar[dict[str, type[NodeConfig]]] = {}

    type: Any  # every subclass narrows it to the one literal that it answers to

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "target" in cls.__dict__:
            NodeConfig.registry[type_of(cls)] = cls

    def infer(self, width: Width) -> Cost:
        """Check the width that comes in and return what the node costs.

        Raises:
            WidthError: the node, or one inside, does not take this width.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define infer(width) -> Cost")


@contextlib.contextmanager
def types_kept() -> Generator[None]:
    """Within, what is imported adds no types: those of a person's own are known while a manifest is read that names
    their plugin, and none takes the place of caramba's."""
    before = dict(NodeConfig.registry)
    try:
        yield
    finally:
        NodeConfig.registry.clear()
        NodeConfig.registry.update(before)


def type_of(schema: type[NodeConfig]) -> str:
    """Return the `type` that a schema class answers to."""
    return schema.__name__.removesuffix("Config")


def is_own(schema: type[NodeConfig]) -> bool:
    """Whether a schema class is a person's own, and no part of caramba: nothing but its methods is known of it."""
    return schema.__module__.partition(".")[0] != "caramba"


def parse_node(value: Any) -> Any:
    """Validate a mapping as the node that its `type` names.

    Raises:
        PydanticCustomError: no `type`, or one that no schema class answers to (with the nearest name).
    """
    if isinstance(value, NodeConfig):
        return value
    if not is_mapping(value):
        raise PydanticCustomError(
            "node_type",
            "expected a mapping with a `type`, such as {example}",
            {"example": "{type: RMSNormLayer, d_model: 64}"},
        )
    if "type" not in value:
        refuse_executable(value)
        raise PydanticCustomError(
            "missing_type",
            "a node needs a `type`; one of: {known}",
            {"known": ", ".join(sorted(NodeConfig.registry))},
        )
    schema = NodeConfig.registry.get(str(value["type"]))
    if schema is None:
        hint = nearest(value["type"], NodeConfig.registry) or "."
        error = PydanticCustomError(
            "unknown_type",
            "unknown type{hint} Known types: {known} (a layer of your own: name its module in plugins)",
            {"hint": hint, "known": ", ".join(sorted(NodeConfig.registry))},
        )
        details = InitErrorDetails(type=error, loc=("type",), input=value["type"])
        raise ValidationError.from_exception_data("Node", [details])
    if hasattr(schema, "key"):  # an extension, whose place is another key
        raise PydanticCustomError(
            "extension_kind",
            "type {name} is no layer; its place is {key}",
            {"name": str(value["type"]), "key": str(getattr(schema, "key", ""))},
        )
    return parse_typed(schema, value)


def parse_typed(schema: type[NodeConfig], value: Any) -> Any:
    """Validate a mapping as a registered schema; what fails in a class of a plugin is reported with its name.

    Raises:
        ConfigError: a rule of a plugin's class raises other errors than pydantic expects.
    """
    if not is_own(schema):
        return schema.model_validate(value)
    try:
        return schema.model_validate(value)
    except ValidationError:
        raise
    except Exception as error:  # what pydantic does not turn into a problem of the value
        raise ConfigError(f"the rules of {schema.__name__} failed: {user_traceback(error)}") from error


# The JSON schema of a node is the union of every registered class, which only `caramba.config.schema` can write out.
NODE_MARK = "x-caramba-node"
Node = Annotated[Any, BeforeValidator(parse_node), WithJsonSchema({NODE_MARK: True})]


class ExtensionConfig(NodeConfig):
    """The schema of an extension. `target` is "module:Class", imported before a run trains.

    A subclass `FooConfig` of one of the kinds below answers to `type: Foo` at the key of its kind.
    """

    kind: ClassVar[str]
    key: ClassVar[str]
    base: ClassVar[str | None] = None
    """Class that the target inherits from, "module:Class"."""
    methods: ClassVar[Mapping[str, tuple[str, ...]]]
    """Arguments of each method that the target must have, after `self`."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Classes of Lightning that users ask for by name, and what does the same here."""

    @classmethod
    def signature(cls) -> str:
        """Return what a target looks like, for messages."""
        base = f"({cls.base.replace(':', '.')})" if cls.base else ""
        methods = "; ".join(f"def {name}({', '.join(('self', *arguments))})" for name, arguments in cls.methods.items())
        return f"class Name{base}: {methods}"


class CallbackConfig(ExtensionConfig):
    """A Lightning callback of your own, in `callbacks`, for every phase; its hooks run before the state is saved."""

    kind = "callback"
    key = "callbacks"
    base = "lightning.pytorch:Callback"
    methods = {"__init__": ("config",)}
    elsewhere = {
        "EarlyStopping": "trainer.early_stopping.patience=N",
        "EMAWeightAveraging": "train.ema_decay=X",
        "GradientAccumulationScheduler": "train.gradient_accumulation_steps=N",
        "LearningRateMonitor": "lr in metrics.csv",
        "ModelCheckpoint": "trainer.save_top_k=N or trainer.save_last_k=N",
        "ModelSummary": "caramba compile",
        "RichProgressBar": "settings.instrument=rich",
        "Timer": "trainer.max_time=DD:HH:MM:SS",
        "TQDMProgressBar": "settings.instrument=plain",
        "WeightAveraging": "train.ema_decay=X",
    }


class MetricLoggerConfig(ExtensionConfig):
    """A Lightning logger of your own, in `logger.extra`. It gets every row of metrics of a phase once."""

    kind = "logger"
    key = "logger.extra"
    base = "lightning.pytorch.loggers:Logger"
    methods = {"__init__": ("config", "run_dir", "phase")}


class LossConfig(ExtensionConfig):
    """A loss of your own, at `train.loss`: logits [B, T, V] and targets [B, T], -100 where none counts, to a scalar."""

    kind = "loss"
    key = "train.loss"
    methods = {"__init__": ("config",), "__call__": ("logits", "targets")}


class OptimizerConfig(ExtensionConfig):
    """An optimiser of your own, at `train.optimizer`; `params` are groups with `params`, `lr` and `weight_decay`."""

    kind = "optimizer"
    key = "train.optimizer"
    base = "torch.optim:Optimizer"
    methods = {"__init__": ("params", "config")}


class ScheduleConfig(ExtensionConfig):
    """A schedule of your own, at `train.scheduler`: the factor of lr at step 0 to steps - 1, warm-up included."""

    kind = "schedule"
    key = "train.scheduler"
    methods = {"__init__": ("config",), "__call__": ("step", "steps")}


class DataSourceConfig(ExtensionConfig):
    """Texts of your own, at `data.source` with `data.type=source`; `texts` yields documents of `train` and `val`.

    They are tokenised once into a token folder, again when keys or source change.
    """

    kind = "data source"
    key = "data.source"
    methods = {"__init__": ("config",), "texts": ("split",)}


class OwnBenchmarkConfig(ExtensionConfig):
    """A benchmark of your own, as `config` of a benchmark: numbers by name, for each model.

    `windows(block_size)` returns held-out windows of input and target ids, as a torch data set.
    """

    kind = "benchmark"
    key = "benchmark.benchmarks[].config"
    methods = {"__init__": ("config",), "__call__": ("model", "windows", "tokenizer")}


class OwnCheckConfig(ExtensionConfig):
    """A check of your own, in `verify.checks`: numbers by name, compared with the bounds `max` and `min`."""

    kind = "check"
    key = "verify.checks"
    methods = {"__init__": ("config",), "__call__": ("teacher", "student", "windows")}
    max: dict[str, float] = Field(default={}, description="largest value that passes, by name")
    min: dict[str, float] = Field(default={}, description="least value that passes, by name")
    fail_fast: bool = Field(default=False, description="whether a value beyond its bound ends the run")


KINDS: tuple[type[ExtensionConfig], ...] = (
    CallbackConfig,
    MetricLoggerConfig,
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
    DataSourceConfig,
    OwnBenchmarkConfig,
    OwnCheckConfig,
)


def parse_extension(kind: type[ExtensionConfig], value: Any) -> Any:
    """Validate a mapping as the extension of a kind that its `type` names.

    Raises:
        PydanticCustomError: no mapping with a `type`, an unknown one, or one of another kind.
    """
    if isinstance(value, kind):
        return value
    known = {name: schema for name, schema in NodeConfig.registry.items() if issubclass(schema, kind)}
    names = ", ".join(sorted(known)) or "none; name your module in plugins"
    if not is_mapping(value) or "type" not in value:
        raise PydanticCustomError(
            "extension_type",
            "expected a mapping with the `type` of a {kind}, such as {{type: MyName}}; known: {known}",
            {"kind": kind.kind, "known": names},
        )
    name = str(value["type"])
    found = NodeConfig.registry.get(name)
    if found is not None and name not in known:
        other = f"a {found.kind}, for {found.key}" if issubclass(found, ExtensionConfig) else "a layer"
        raise PydanticCustomError(
            "extension_kind",
            "type {name} is {other}; {key} takes a {kind}: subclass caramba.config.{schema}, {signature}",
            {
                "name": name,
                "other": other,
                "key": kind.key,
                "kind": kind.kind,
                "schema": kind.__name__,
                "signature": kind.signature(),
            },
        )
    if found is None:
        hint = f"; here it is {kind.elsewhere[name]};" if name in kind.elsewhere else nearest(name, known)
        raise PydanticCustomError(
            "unknown_extension",
            "unknown {kind} '{name}'{hint} known: {known}",
            {"kind": kind.kind, "name": name, "hint": hint or ";", "known": names},
        )
    return parse_typed(found, value)


MAPPING: dict[str, Any] = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
"""JSON Schema of an extension; its other keys are those of its plugin."""


def extension_of(kind: type[ExtensionConfig]) -> Callable[[Any], Any]:
    """Return the validator of a key that takes an extension of a kind."""
    return lambda value: parse_extension(kind, value)


class NameOrExtension:
    """Validate one of the literal `names`, or an extension of a kind; `schema` is the JSON Schema."""

    def __init__(self, names: Any, kind: type[ExtensionConfig]) -> None:
        self.adapter: TypeAdapter[Any] = TypeAdapter(names)
        self.kind = kind

    def __call__(self, value: Any) -> Any:
        if is_mapping(value) or isinstance(value, ExtensionConfig):
            return parse_extension(self.kind, value)
        return self.adapter.validate_python(value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.adapter.json_schema(), MAPPING]}


class OrExtension:
    """Marks a union of built-in kinds that an extension may take the place of, by its `type`."""

    def __init__(self, kind: type[ExtensionConfig]) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._validate,
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema["schema"]), MAPPING]}  # type: ignore[typeddict-item]

    def _validate(self, value: Any, built_in: Callable[[Any], Any]) -> Any:
        if isinstance(value, self.kind):
            return value
        found = NodeConfig.registry.get(str(value.get("type"))) if is_mapping(value) else None
        if found is not None and issubclass(found, ExtensionConfig):
            return parse_extension(self.kind, value)
        return built_in(value)


def _dump(value: Any, info: core_schema.SerializationInfo) -> dict[str, Any]:
    return value.model_dump(
        mode=info.mode,
        exclude_none=info.exclude_none,
        exclude_unset=info.exclude_unset,
        exclude_defaults=info.exclude_defaults,
    )


def name_of(value: Any) -> str:
    """Return the name of a built-in choice, or the type of an extension in its place."""
    return value if isinstance(value, str) else str(value.type)


Callback = Annotated[Any, BeforeValidator(extension_of(CallbackConfig)), WithJsonSchema(MAPPING)]
MetricLogger = Annotated[Any, BeforeValidator(extension_of(MetricLoggerConfig)), WithJsonSchema(MAPPING)]
Loss = Annotated[Any, BeforeValidator(extension_of(LossConfig)), WithJsonSchema(MAPPING)]
DataSource = Annotated[Any, BeforeValidator(extension_of(DataSourceConfig)), WithJsonSchema(MAPPING)]


_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def user_traceback(error: BaseException) -> str:
    """Return `ZeroDivisionError: division by zero (my_pkg/layers.py:7)`, the innermost line that is the person's own.

    Of an error without such a line, the innermost one outside of caramba and of the import machinery.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({shown(error.filename)}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", _OURS))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    place = next(reversed(own or frames), None)
    return text if place is None else f"{text} ({shown(place.filename)}:{place.lineno})"


def shown(file: str | Path) -> str:
    """Return a file's path as a message names it: relative to the current folder if it is below it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
