"""Nearest names, for every error that can offer one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from caramba.errors import quote

Kind = TypeVar("Kind", bound=StrEnum)
LONGEST_NAME = 100
"""Characters of a name that is compared; no longer one is a typing error."""


def nearest(name: object, options: Iterable[object]) -> str:
    """Return "; did you mean 'x'?" for the option closest to `name`, or an empty string."""
    if len(str(name)) > LONGEST_NAME:
        return ""
    near = difflib.get_close_matches(str(name), [str(option) for option in options], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def member(kind: type[Kind], name: str) -> Kind:
    """Return the member of an enum that `name` is.

    Raises:
        ValueError: it is none, with all that there are and the nearest.
    """
    if name not in set(kind):
        raise ValueError(f"got {quote(name)}, expected one of {' '.join(kind)}{nearest(name, kind)}")
    return kind(name)
