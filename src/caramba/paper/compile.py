"""pdflatex in a folder of its own: no shell, no file outside it, no key in its environment, a limit on all it takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from caramba.errors import ConfigError
from caramba.paper.document import STYLES

TIMEOUT_S = 60.0
# Seconds of CPU, blocks of 512 bytes of a file, KiB of memory.
_LIMITED = 'ulimit -t 60; ulimit -f 200000; ulimit -v 4000000 2>/dev/null; exec "$@"'
_HOMES = ("HOME", "TEXMFHOME", "TEXMFVAR", "TEXMFCONFIG", "TMPDIR")
# Paranoid: no absolute path, no parent folder, no hidden file. Dates are fixed.
_ENVIRONMENT = {
    "openin_any": "p", "openout_any": "p", "shell_escape": "f", "max_print_line": "1000", "LC_ALL": "C",
    "SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1",
}  # fmt: skip
_WARNINGS = {
    "reference %s": r"LaTeX Warning: (?:Hyper r|R)eference `([^']*)' (?:on page \d+ )?undefined",
    "citation %s": r"Package natbib Warning: Citation `([^']*)'",
    "label %s (defined twice)": r"LaTeX Warning: Label `([^']*)' multiply defined",
}


@dataclass(frozen=True)
class Compiled:
    """What LaTeX made of a paper: the PDF, or the error that stopped it; and the names that led nowhere.

    `files` are those of a paper that also passed the gate.
    """

    pdf: bytes | None
    error: str | None
    undefined: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=lambda: {})


def need_latex(where: str) -> None:
    """Refuse when a paper could not be compiled here, before anything is paid for.

    Raises:
        ConfigError: naming the program or the style files, and what to install.
    """
    missing = [name for name in ("pdflatex", "bibtex", "kpsewhich") if shutil.which(name) is None]
    if not missing:
        files = [*(f"{name}.sty" for name in STYLES), "plainnat.bst"]
        done = subprocess.run(["kpsewhich", *files], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        found = {Path(line).name for line in done.stdout.splitlines()}
        missing = [name for name in files if name not in found]
    if missing:
        raise ConfigError(
            f"{where}: {', '.join(missing)} not found, and no version is kept that does not compile; install "
            "texlive-latex-recommended (Debian, Ubuntu), or MacTeX or TeX Live elsewhere"
        )


def compile_paper(files: Mapping[str, bytes], *, timeout_s: float = TIMEOUT_S, passes: int = 2) -> Compiled:
    """Compile `paper.tex` among `files`, given by their paths relative to it; bibtex runs if it has a bibliography.

    Every program has `timeout_s` seconds. The same files give the same PDF.
    """
    with tempfile.TemporaryDirectory(prefix="caramba-paper-") as name:
        folder = Path(name)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        latex = ["pdflatex", "-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
        has_bibliography = rb"\bibliography{" in files["paper.tex"]
        for step in [latex, ["bibtex", "paper"], latex, latex] if has_bibliography else [latex] * passes:
            if (error := _run(step, folder, timeout_s)) is not None:
                return Compiled(None, error)
        log = (folder / "paper.log").read_text(encoding="utf-8", errors="replace")
        wrong = [shown % found for shown, pattern in _WARNINGS.items() for found in re.findall(pattern, log)]
        return Compiled((folder / "paper.pdf").read_bytes(), None, tuple(dict.fromkeys(wrong)))


def _run(command: list[str], folder: Path, timeout_s: float) -> str | None:
    """Run one program and return its error, None when it succeeded."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), **dict.fromkeys(_HOMES, str(folder)), **_ENVIRONMENT}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", _LIMITED, "sh", *command], cwd=folder, env=environment, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{command[0]} ran longer than {timeout_s:g} s; the text may loop"
    if done.returncode == 0:
        return None
    lines = done.stdout.decode("utf-8", errors="replace").splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("!")), max(len(lines) - 12, 0))
    shown = "\n".join(line for line in lines[start : start + 12] if line.strip())
    return f"{command[0]} failed (status {done.returncode}):\n{shown}"
