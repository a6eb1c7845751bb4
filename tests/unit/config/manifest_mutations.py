"""Random mutations of the manifests of conf: each case follows from a seed and a number."""

from __future__ import annotations

import copy
import math
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GIANTS: tuple[Any, ...] = (
    *(2**31, 2**63 - 1, 2**63, 10**30, 10**400, -1, -(2**63), 0, 1e308, -1e308, 1e-320, 0.1, -0.0),
    *(math.nan, math.inf, -math.inf, 1 << 20_000),
)
TEXTS = (
    *("", " ", "\x1b[31mred", "a\x00b", "a\nb", "\u202eabc", "\u00b2", "caf\u00e9", "\U0001f600"),
    "x" * 100_000,
    *"a.b.c ../x ~ ??? null true auto 1e3 sk-proj-Abcdef0123456789Abcdef = [ {}".split(),  # noqa: SIM905
    *("0x" + "f" * 20_000, "9" * 5_000, "1_000", "12:30:45", "2024-01-01", "!!binary", "_target_", "a" * 255),
    "/" * 5_000,
)
REFERENCES = (
    *"${model.embedder.d_model} ${vars} ${.} ${..} ${} ${name} ${model} x${seed}y${name} ${oc.env:HOME}".split(),  # noqa: SIM905
    *("${a${b}}", "${groups}", "${vars.\u00b2}", "${vars.9999999999}", "${" + "a." * 5_000 + "b}"),
)
KEYS = (
    *"type layers repeat n_cycles steps d_model n_heads model groups runs id name vars defaults settings".split(),  # noqa: SIM905
    *("_target_", "<<", "", "x\x1b", "k" * 50_000, "parallel", "fit", "plugins"),
)
ODD_KEYS = (1, None, True, 2.5, -1, math.nan)
LINES = (
    *("a: &a [*a]", "<<: *a", "? [1, 2]\n: 3", "- x", "\tx: 1", "x: !!python/object:os.system {}"),
    *("x: !!int abc", "--- \ny: 1", "x: 'open", 'x: "\\ud800"', "%TAG ! x", "x: 1\nx: 2", "&a a: *a"),
    *("\x07", "x: |\n  a", "..."),
)


@dataclass(frozen=True)
class Originals:
    """Composed experiments as trees, and the text of every option by group and name."""

    trees: tuple[dict[str, Any], ...]
    options: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Case:
    """A mutated manifest. `key` is the last key of the one place that was changed, None of several."""

    text: str
    kinds: tuple[str, ...]
    group: str | None = None
    key: str | None = None

    def write(self, folder: Path) -> tuple[list[str], list[Path]]:
        """Write the manifest; return the overrides and folders that `freeze` takes."""
        data = self.text.encode("utf-8", "surrogatepass")
        if self.group is None:
            file = folder / "mutated.yaml"
            file.write_bytes(data)
            return [f"manifest={file}"], []
        options = folder / "options"
        shutil.rmtree(options, ignore_errors=True)
        (options / self.group).mkdir(parents=True, exist_ok=True)
        (options / self.group / "mutated.yaml").write_bytes(data)
        alone = ["train=pretrain", "verify=none", "benchmark=none"]
        bases = {"model": alone, "parallel": ["model=tiny", *alone], "experiment": []}
        return [*bases.get(self.group, ["model=tiny_dba"]), f"{self.group}=mutated"], [options]


def originals() -> Originals:
    """Compose the experiments of conf that need nothing else, and read its options."""
    from caramba.launch.compose import default_groups
    from caramba.launch.config_files import groups
    from caramba.launch.freeze import freeze

    words = [[f"experiment={name}"] for name in ("smoke", "decoupled", "llama32_dba_compare", "llama32_dba_paper")]
    words += [
        ["model=tiny", "train=pretrain", "parallel=ddp", "paper=draft"],
        ["model=tiny_dba", "train=upcycle"],
    ]
    trees = tuple(freeze(each).manifest.model_dump(mode="json", exclude_unset=True) for each in words)
    chosen = {group: groups()[group] for group in default_groups() if group in groups()}
    options = tuple(
        (group, name, file.read_text(encoding="utf-8"))
        for group, files in sorted(chosen.items())
        for name, file in sorted(files.items())
        if name != "none"
    )
    return Originals(trees, options)


def make_case(sources: Originals, seed: int, index: int) -> Case:
    """Return case `index` of a seed."""
    chance = random.Random(f"{seed}:{index}")
    group, header = None, ""
    if chance.random() < 0.7:
        tree: Any = copy.deepcopy(chance.choice(sources.trees))
    else:
        group, _, text = chance.choice(sources.options)
        tree = yaml.safe_load(text) or {}
        header = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("# @"))
    kinds, key = list[str](), None
    n_mutations = chance.choice((1, 1, 1, 2, 4))
    for _ in range(n_mutations):
        kind, key = _mutate_tree(tree, chance)
        kinds.append(kind)
    text = header + _dump(tree)
    if chance.random() < 0.15:
        text, kind = _mutate_text(text, chance)
        kinds.append(kind)
        key = None
    return Case(text, tuple(kinds), group, key if len(kinds) == 1 else None)


def _dump(tree: Any) -> str:
    """Return YAML in which equal parts are written out, as a person writes."""

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Plain.add_representer(
        int,
        lambda dumper, data: dumper.represent_scalar(
            "tag:yaml.org,2002:int", hex(data) if data > 2**9_999 else str(data)
        ),
    )
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # of a nested graft of nested values
    try:
        return yaml.dump(tree, Dumper=Plain, allow_unicode=True, sort_keys=False)
    finally:
        sys.setrecursionlimit(limit)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found, stack = list[tuple[Any, Any]](), [tree]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                stack.append(node[key])
    return found


def _mutate_tree(tree: Any, chance: random.Random) -> tuple[str, str | None]:
    """Change one place of a tree; return how, and its key where a refusal has to name it."""
    places = _places(tree)
    if not places:
        tree["x"] = 1
        return "add", None
    node, key = chance.choice(places)
    named = key if isinstance(key, str) else None
    kind = chance.choice(("swap", "number", "text", "reference", "nest", "delete", "rename", "add", "graft", "list"))
    if kind == "swap":
        node[key] = copy.deepcopy(chance.choice(({}, [], None, True, 7, 1.5, "x", [1], {"a": 1}, [[]], [None])))
    elif kind == "number":
        node[key] = chance.choice(GIANTS)
    elif kind == "text":
        node[key] = chance.choice(TEXTS)
    elif kind == "reference":
        node[key] = chance.choice(REFERENCES)
    elif kind == "nest":
        node[key] = _nested(node[key], chance)
    elif kind == "graft":
        other, at = chance.choice(places)
        node[key] = copy.deepcopy(other[at])
    elif kind == "list":
        node[key] = [copy.deepcopy(node[key]) for _ in range(chance.choice((0, 2, 30, 300)))]
    elif kind == "delete" or isinstance(node, list):
        items: Any = node
        items.pop(key)
        return "delete", None
    else:
        new: Any = chance.choice((*KEYS, *ODD_KEYS)) if chance.random() < 0.7 else str(key)[:-1] + "x"
        node[new] = node.pop(key) if kind == "rename" else chance.choice((*GIANTS, *TEXTS, None, {}, []))
        return kind, None
    return kind, named


def _nested(value: Any, chance: random.Random) -> Any:
    is_list, key = chance.random() < 0.5, chance.choice(("layers", "a", "type", "x" * 200))
    for _ in range(chance.choice((1, 2, 50, 90, 150))):
        value = [value] if is_list else {key: value}
    return value


def _mutate_text(text: str, chance: random.Random) -> tuple[str, str]:
    """Change the text: a line of its own, an anchor and aliases, characters lost, changed or doubled."""
    lines = text.splitlines(keepends=True)
    at = chance.randrange(len(lines) + 1)
    kind = chance.choice(("line", "anchor", "bomb", "characters", "cut", "double"))
    if kind == "line":
        lines.insert(at, f"{chance.choice(LINES)}\n")
    elif kind == "anchor":
        scalars = [i for i, line in enumerate(lines) if re.search(r": [A-Za-z0-9_.]+$", line)]
        if len(scalars) > 1:
            first, second = sorted(chance.sample(scalars, 2))
            lines[first] = lines[first].replace(": ", ": &z ", 1)
            lines[second] = re.sub(r": .*$", ": *z", lines[second])
    elif kind == "bomb":
        width, depth = chance.choice(((10, 3), (10, 6), (2, 40), (100, 3)))
        bomb = ["b0: &b0 [x]\n"]
        bomb += [f"b{i}: &b{i} [{','.join([f'*b{i - 1}'] * width)}]\n" for i in range(1, depth)]
        lines += ["vars:\n", *(f"  {line}" for line in bomb)] if "vars:" not in text else bomb
    elif kind == "cut":
        del lines[at : at + chance.randrange(1, 10)]
    elif kind == "double":
        lines[at:at] = lines[at : at + chance.randrange(1, 10)]
    else:
        letters = list(text)
        for _ in range(chance.randrange(1, 6)):
            letters[chance.randrange(len(letters))] = chance.choice(
                "\x00\x1b\t:-[]{}&*!|>'\"%@`#,? \u2028\ufeff\u00e9x0"
            )
        return "".join(letters), kind
    return "".join(lines), kind
