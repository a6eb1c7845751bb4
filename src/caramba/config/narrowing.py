"""Narrowing of plain data (what YAML and JSON hold) to mappings and lists of anything."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_mapping(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Whether `value` is a dict."""
    return isinstance(value, dict)


def is_sequence(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether `value` is a list or a tuple."""
    return isinstance(value, list | tuple)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether `value` is a list."""
    return isinstance(value, list)


def mapping_of(value: Any) -> dict[str, Any]:
    """Return `value` when it is a mapping, else an empty one: schema errors are for the schema to report."""
    return value if is_mapping(value) else {}


def list_of(value: Any) -> list[Any]:
    """Return `value` as a list when it is one or a tuple, else an empty list."""
    return list(value) if is_sequence(value) else []
