"""Metric keys: parsing and formatting."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from caramba.errors import CarambaError

Condition = int | str

# Families whose keys name no model: `ratio` is student over teacher, `verify` names a type and a check.
MODELLESS = frozenset({"ratio", "verify"})
_NAME = re.compile(r"[^\s.@=,]+")
_FIELD = re.compile(r"[^\s@=,]+")
_WORD = re.compile(r"[^\s@=,]+")
_SHAPE = "FAMILY.MODEL.FIELD@NAME=VALUE,..., or ratio.FIELD@..., or verify.TYPE.NAME"


def _no_conditions() -> dict[str, Condition]:
    return {}


@dataclass(frozen=True)
class MetricKey:
    """A metric's name in parts: `latency.student.tok_s@prompt=128,gen=32,batch=1`.

    `model` is None in the families `ratio` and `verify`; the field of a verify key is `<type>.<name>`.
    Conditions keep their order in the text and ignore it in comparisons; integers in the text are int here.

    Raises:
        CarambaError: a part is empty or holds a character that separates parts.
    """

    family: str
    model: str | None
    field: str
    conditions: Mapping[str, Condition] = dataclasses.field(default_factory=_no_conditions)

    def __post_init__(self) -> None:
        conditions = {name: _value(value) for name, value in self.conditions.items()}
        object.__setattr__(self, "conditions", conditions)
        parts = [(_NAME, self.family), (_FIELD, self.field)]
        parts += [(_NAME, self.model)] if self.model is not None else []
        parts += [(_WORD, name) for name in self.conditions]
        parts += [(_WORD, str(value)) for value in self.conditions.values()]
        for pattern, text in parts:
            if not pattern.fullmatch(text):
                raise CarambaError(f"metric key: {text!r} is empty or holds a separator; expected {_SHAPE}")
        if (self.model is None) != (self.family in MODELLESS):
            raise CarambaError(f"metric key: {self.family!r} with model {self.model!r}; expected {_SHAPE}")

    def __hash__(self) -> int:
        return hash((self.family, self.model, self.field, frozenset(self.conditions.items())))

    def __str__(self) -> str:
        return self.format()

    def format(self) -> str:
        """Return the key as text; `parse_key` reads it back to an equal key."""
        head = ".".join(part for part in (self.family, self.model, self.field) if part is not None)
        tail = ",".join(f"{name}={value}" for name, value in self.conditions.items())
        return f"{head}@{tail}" if tail else head

    def given(self, **conditions: Condition) -> MetricKey:
        """Return this key with further conditions after its own."""
        return MetricKey(self.family, self.model, self.field, {**self.conditions, **conditions})


def parse_key(text: str) -> MetricKey:
    """Parse a metric key.

    Raises:
        CarambaError: the text is not a metric key; the message shows the form of one.
    """
    head, at, tail = text.partition("@")
    family, _, rest = head.partition(".")
    model, name = (None, rest) if family in MODELLESS else rest.partition(".")[::2]
    conditions: dict[str, Condition] = {}
    for item in tail.split(",") if at else ():
        label, equals, value = item.partition("=")
        if not equals or label in conditions:
            raise CarambaError(f"metric key {text!r}: {item!r} is not NAME=VALUE once; expected {_SHAPE}")
        conditions[label] = value
    try:
        return MetricKey(family, model, name, conditions)
    except CarambaError as error:
        raise CarambaError(f"metric key {text!r}: {error}") from error


def as_word(text: str) -> str:
    """Return `text` with the characters that separate a key's parts replaced, for use as a part."""
    return re.sub(r"[\s@=,]+", "_", text) or "_"


def _value(value: Condition) -> Condition:
    """Read canonical decimal integers as int, so that 128 and "128" are one condition."""
    if isinstance(value, int):
        return int(value)
    return int(value) if re.fullmatch(r"0|-?[1-9][0-9]*", value) else value
