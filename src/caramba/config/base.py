"""The base of every schema class: strict, frozen, closed, with aliases and nearest names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from caramba.config.source import is_list, is_mapping, is_sequence
from caramba.errors import nearest

__all__ = ["EXECUTABLE_KEYS", "Config", "PathText", "Seed", "nearest", "refuse_executable"]

LONGEST_NAME, LONGEST_PATH = 255, 4_095
"""Bytes of one name and of a whole path that file systems of Linux and macOS hold."""


def _fits_file_system(path: str) -> str:
    longest = max(len(part.encode(errors="replace")) for part in path.split("/"))
    if longest > LONGEST_NAME or len(path.encode(errors="replace")) > LONGEST_PATH:
        raise ValueError(
            f"got a path of {len(path):,} characters with a name of {longest:,} bytes; "
            f"expected at most {LONGEST_NAME} bytes in a name and {LONGEST_PATH:,} in all"
        )
    return path


PathText = Annotated[str, AfterValidator(_fits_file_system)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What torch's and NumPy's generators all take."""
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0, le=1)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]

MOST_HINTS = 10
"""Unknown keys of a mapping that get a nearest name: a comparison with every known name takes time."""
EXECUTABLE_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_", "_call_"})

SLUG = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


def refuse_executable(value: Any, path: tuple[Any, ...] = ()) -> None:
    """Raise when a mapping at any depth names code to run (`_target_` and its kin): manifests are data."""
    if is_mapping(value):
        for key, item in value.items():
            if key in EXECUTABLE_KEYS:
                raise _executable(key, path)
            refuse_executable(item, (*path, key))
    elif is_sequence(value):
        for index, item in enumerate(value):
            refuse_executable(item, (*path, index))


def _executable(key: str, path: tuple[Any, ...]) -> PydanticCustomError:
    return PydanticCustomError(
        "executable_key",
        "{key} would run code, and a manifest only names things; use `type:` with a known class",
        {"key": str(key), "path": list(path)},
    )


class Config(BaseModel):
    """A frozen node of a manifest. Unknown keys are errors that carry the nearest known name."""

    # What is not finite could not be written to manifest.json, which is JSON.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )

    aliases: ClassVar[dict[str, str]] = {}

    @classmethod
    def hint(cls, key: str, names: Sequence[str]) -> str:
        """Return "; did you mean 'x'?" for an unknown key, or an empty string; `names` are the known ones."""
        return nearest(key, names)

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, value: Any) -> Any:
        if not is_mapping(value):
            return value
        wrong = _refused_keys(cls, value)
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return {cls.aliases.get(key, key): tuple(item) if is_list(item) else item for key, item in value.items()}


def _refused_keys(schema: type[Config], value: dict[Any, Any]) -> list[InitErrorDetails]:
    """All keys of a mapping that its schema cannot take, so that a user sees every typo at once and no knock-on."""
    wrong: list[InitErrorDetails] = []
    seen: set[Any] = set()
    names, known = [*schema.model_fields, *schema.aliases], ", ".join(schema.model_fields)
    for key, item in value.items():
        name = schema.aliases.get(key, key)
        error: PydanticCustomError | None = None
        if name in EXECUTABLE_KEYS:
            error = _executable(name, ())
        elif name not in schema.model_fields:
            error = PydanticCustomError(
                "unknown_key",
                "unknown key{hint} Known keys: {known}",
                {
                    "key": str(key),
                    "hint": (schema.hint(str(key), names) if len(wrong) < MOST_HINTS else "") or ".",
                    "known": known,
                },
            )
        elif name in seen:
            error = PydanticCustomError(
                "alias_clash",
                "{key} is another name of {name}, and both are set; keep one",
                {"key": _alias_of(schema, name, value), "name": name},
            )
        seen.add(name)
        if error is not None:
            wrong.append(InitErrorDetails(type=error, loc=(str(key),), input=item))
    return wrong


def _alias_of(schema: type[Config], name: str, value: dict[Any, Any]) -> str:
    return next(str(key) for key in value if key != name and schema.aliases.get(key) == name)
