"""Count what the house is to be: lines, packages, files passed by common actions, import circles.

Usage: python scripts/house.py [--json FILE] [--no-walks] [--update]
  --no-walks  leave out the counts that run a process (about 30 s)
  --update    lower the ceilings in scripts/ceilings.json to today's counts
tests/integration/test_walks.py holds the counts that have a ceiling.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ceilings import lower_ceilings, read_ceilings

ROOT = Path(__file__).resolve().parents[1]
WALKS = ("training", "token", "generation", "decoding")
MUST = {
    "lines: src/caramba": 57_000,
    "lines: kernels": 11_500,
    "lines: scripts": 6_000,
    "packages": 22,
    "walk: training": 80,
    "walk: token": 12,
    "walk: generation": 40,
    "walk: decoding": 60,
    "import circles": 0,
}
CODE = {".py", ".cu", ".cuh", ".metal", ".sh"}


def count_lines(folder: Path) -> int:
    """Return the lines of source files under a folder, blank ones and comments included."""
    files = (file for file in folder.rglob("*") if file.suffix in CODE)
    return sum(file.read_bytes().count(b"\n") for file in files)


def count_packages(root: Path = ROOT) -> int:
    """Return the packages directly under src/caramba."""
    return sum(1 for _ in (root / "src/caramba").glob("*/__init__.py"))


def find_circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others.

    `imports` maps a module to those that it imports anywhere, inside functions included. These are the strongly
    connected components of more than one module.
    """
    import networkx

    graph = networkx.DiGraph([(module, target) for module, targets in imports.items() for target in targets])
    return sorted(sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1)


def read_imports() -> dict[str, set[str]]:
    """Return the imports between modules of caramba, without those for type checkers alone."""
    import grimp

    graph = grimp.build_graph("caramba", exclude_type_checking_imports=True, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def count_walk(name: str) -> int:
    """Return the files of one walk of scripts/walks.py, which runs in a process of its own.

    Raises:
        RuntimeError: The walk failed; the message has what it printed.
    """
    command = [sys.executable, str(ROOT / "scripts/walks.py"), name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"walk {name} exited with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)["count"]


def count_house(*, with_walks: bool = True) -> dict[str, int]:
    """Return every count by its name in `MUST`."""
    counts = {f"lines: {folder}": count_lines(ROOT / folder) for folder in ("src/caramba", "kernels", "scripts")}
    counts["packages"] = count_packages()
    counts["import circles"] = len(find_circles(read_imports()))
    if with_walks:
        counts |= {f"walk: {name}": count_walk(name) for name in WALKS}
    return counts


def has_ceiling(name: str) -> bool:
    """True for counts that may only fall; lines may grow with what the project can do."""
    return not name.startswith("lines")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--no-walks", action="store_true")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args(argv)
    counts = count_house(with_walks=not options.no_walks)
    ceilings = read_ceilings("house")
    print(f"{'count':22}{'now':>8}{'ceiling':>9}{'must':>8}")
    for name, count in counts.items():
        print(f"{name:22}{count:>8,}{ceilings.get(name, ''):>9}{MUST[name]:>8,}")
    if options.json is not None:
        options.json.write_text(json.dumps(counts, indent=2) + "\n")
    if options.update:
        lower_ceilings("house", {name: count for name, count in counts.items() if has_ceiling(name)})
    return 1 if any(count > ceilings.get(name, count) for name, count in counts.items()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
