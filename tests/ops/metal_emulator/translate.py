"""Metal source to C++ of the emulator: pointers and threadgroup arrays become checked ones, attributes become calls."""

from __future__ import annotations

import re
from dataclasses import dataclass

SPACES = {"device": "DEVICE", "threadgroup": "THREADGROUP"}
POSITIONS = (
    *("thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid"),
    *("threads_per_threadgroup", "threads_per_grid", "threadgroups_per_grid", "thread_index_in_threadgroup"),
    *("thread_index_in_simdgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup"),
    "threads_per_simdgroup",
)
_KERNEL = re.compile(
    r"(?:\[\[max_total_threads_per_threadgroup\((\w+)\)\]\]\s*)?kernel\s+void\s+(\w+)\s*\(((?:[^()]|\([^()]*\))*)\)\s*\{"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Translated:
    """C++ of one source: its kernels' names and a namespace that holds them."""

    text: str
    kernels: tuple[str, ...]


def translate(source: str, name: str) -> Translated:
    """Translate a source into namespace `name`, with one C function `NAME_KERNEL` for each of its kernels.

    Raises:
        ValueError: something that the emulator does not know, with the text.
    """
    text = _COMMENT.sub("", source)
    defined = re.findall(r"^\s*#define\s+(\w+)", text, re.MULTILINE)
    text = re.sub(r"^\s*#include\s+<metal_\w+>\s*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*#pragma\s+METAL.*$", "", text, flags=re.MULTILINE)
    if missing := re.search(r"^\s*#include.*$", text, re.MULTILINE):
        raise ValueError(f"{name}: {missing.group().strip()} is not part of the emulator")
    kernels: list[tuple[str, str, list[str]]] = []

    def kernel(found: re.Match[str]) -> str:
        widest, own, given = found.groups()
        declared, calls = zip(*(_parameter(x, own) for x in _parameters(given)), strict=True)
        kernels.append((own, widest or "1024", list(calls)))
        return f"inline void {own}({', '.join(declared)}) {{"

    text = _pointers(_KERNEL.sub(kernel, text))
    text = re.sub(
        r"\bthreadgroup\s+([\w:]+)\s+(\w+)\s*\[([^\]]+)\]\s*;",
        r"auto \2 = emulated::shared<\1, (\3), __COUNTER__>();",
        text,
    )
    text = re.sub(r"\bconstant\s+(constexpr\b)", r"\1", text)
    for left in ("device", "threadgroup", "constant", "kernel"):
        if found := re.search(rf"^.*\b{left}\b(?!\s*\().*$", text, re.MULTILINE):
            raise ValueError(f"{name}: the emulator does not know {found.group().strip()!r}")
    starts = [_start(name, *kernel) for kernel in kernels]
    undefined = [f"#undef {macro}" for macro in dict.fromkeys(defined)]
    parts = [f"namespace {name} {{", text, "}", *starts, *undefined]
    return Translated("\n".join(parts), tuple(own for own, _, _ in kernels))


def _start(name: str, kernel: str, widest: str, calls: list[str]) -> str:
    return f"""
static void body_{name}_{kernel}() {{ {name}::{kernel}({", ".join(calls)}); }}
extern "C" int {name}_{kernel}(emulated::Argument* given, int n, const unsigned* all, const unsigned* size,
                               unsigned long seed, char* error, int room) {{
    std::string found = emulated::launch(body_{name}_{kernel}, given, n, {{all[0], all[1], all[2]}},
                                         {{size[0], size[1], size[2]}}, {widest}, seed);
    std::strncpy(error, found.c_str(), room - 1);
    return int(found.size());
}}"""


def _parameters(given: str) -> list[str]:
    """Split at commas outside of brackets."""
    found, depth, start = [], 0, 0
    for i, char in enumerate(given):
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            found.append(given[start:i])
            start = i + 1
    return [" ".join(x.split()) for x in (*found, given[start:])]


def _parameter(given: str, kernel: str) -> tuple[str, str]:
    """Return a parameter's declaration, and what the launch passes for it."""
    found = re.fullmatch(r"(.+?)\s*\b(\w+)\s*\[\[(\w+)(?:\((\d+)\))?\]\]", given)
    if found is None:
        raise ValueError(f"{kernel}: the emulator does not know the parameter {given!r}")
    kind, name, attribute, place = found.groups()
    if attribute in POSITIONS:
        return f"{kind} {name}", f"emulated::{attribute}()"
    if attribute != "buffer":
        raise ValueError(f"{kernel}: the emulator does not know [[{attribute}]]")
    if pointer := re.fullmatch(r"device\s+((?:const\s+)?[\w:]+)\s*\*", kind):
        return f"{kind} {name}", f"emulated::buffer<{pointer.group(1)}>({place})"
    if number := re.fullmatch(r"constant\s+([\w:]+)\s*&", kind):
        return f"{number.group(1)} {name}", f"emulated::value<{number.group(1)}>({place})"
    raise ValueError(f"{kernel}: the emulator does not know the parameter {given!r}")


def _pointers(text: str) -> str:
    def checked(found: re.Match[str]) -> str:
        space, kind = found.groups()
        return f"emulated::Pointer<emulated::Space::{SPACES[space]}, {kind}> "

    text = re.sub(r"\bthread\s+(\w+)\s*\*", r"\1* ", text)
    return re.sub(r"\b(device|threadgroup)\s+((?:const\s+)?[\w:]+)\s*\*\s*", checked, text)
