"""tables.tex: every number is linked to its key, every name is escaped, and pdflatex accepts it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from caramba.artifacts.latex import build_tables, escape, typeset
from caramba.artifacts.metrics import collect
from caramba.artifacts.tables import number
from caramba.result import BenchmarkResult, Check, Metric, RunResult, Verdict

NASTY = "50%_of$a&b#c {x} ~^\\ <|> é 模 -- \n end"


def tables_of(result: RunResult) -> str:
    tables = build_tables(result, collect(result))
    assert tables is not None
    return tables


def rows_of(tables: str) -> list[tuple[list[str], list[str]]]:
    """Return cells and keys of each row with numbers."""
    lines = [line for line in tables.splitlines() if re.search(r"\\\\ % ", line)]
    parts = [line.strip().split(r" \\ % ") for line in lines]
    return [(cells.split(" & "), keys.split(" | ")) for cells, keys in parts]


def test_every_number_is_followed_by_its_metric_key(result: RunResult) -> None:
    metrics = collect(result)
    rows = rows_of(tables_of(result))
    transplant = {f"transplant.layers[0].{name}" for name in ("cached", "energy_kept", "error", "frequencies")}
    assert len(rows) == 5 + 5 + 2 + 6
    assert transplant <= {key for _, keys in rows for key in keys}
    rows = [(cells, keys) for cells, keys in rows if not any(key.startswith("transplant.") for key in keys)]
    for cells, keys in rows:
        assert len(cells) == len(keys)
        for cell, key in zip(cells, keys, strict=True):
            if key == "-":
                assert not re.match(r"(\$.*?\$ ?)?[0-9]", cell), f"{cell} has no key"
            elif key.endswith("#bound"):
                assert key.removesuffix("#bound") in metrics
            else:
                shown = re.match(r"[0-9.]+", cell.replace("{,}", ""))
                assert shown is not None
                value = metrics[key].value / (2**20 if "MiB" in cell else 1)
                assert float(shown[0]) == pytest.approx(value, rel=6e-3), key


def test_the_tables_say_what_was_measured(result: RunResult) -> None:
    tables = tables_of(result)
    assert r"Perplexity $\downarrow$ & 9.984 $\pm$ 0.210 & 10.40 $\pm$ 0.22 & 1.042$\times$ $\pm$ 0.031 \\" in tables
    assert r"KV cache per token $\downarrow$ (bytes) & 2{,}048 & 768 & 0.375$\times$ \\" in tables
    assert r"Teacher, continued & 9.152 $\pm$ 0.192 & 0.917$\times$" in tables
    assert r"compare & logits\_mean\_l1 & 0.6130 & $\le$ 0.5000 & \textbf{failed} \\" in tables
    assert r"compare & logits\_max\_l1 & 8.200 & -- & recorded \\" in tables
    assert "layer0" not in tables
    assert "Throughput: prompt 1,024, gen 32, batch 1." in tables


def test_a_table_without_rows_is_left_out(result: RunResult) -> None:
    tables = tables_of(dataclasses.replace(result, benchmarks=(), transplant=None))
    assert tables.count(r"\begin{table}") == 1
    assert "tab:caramba-verification" in tables
    assert build_tables(dataclasses.replace(result, benchmarks=(), verdicts=(), transplant=None), {}) is None


def test_specials_are_escaped() -> None:
    assert escape(NASTY) == (
        r"50\%\_of\$a\&b\#c \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} "
        r"\textless{}\textbar{}\textgreater{} é [U+6A21] -{}-   end"
    )
    assert escape("a\x07b") == "ab"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (4096.0, "4{,}096"), (0.05, "0.0500"), (12.345, "12.35"), (135.94, "135.9"), (1234.5, "1{,}234"),
        (-0.25, "$-$0.2500"), (-3.0, "$-$3"), (1.25e-5, r"$1.250\times10^{-5}$"), (2.5e7 + 0.5, r"$2.500\times10^{7}$"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert typeset(number(value)) == text


@pytest.mark.latex
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_pdflatex_accepts_the_tables(result: RunResult, tmp_path: Path) -> None:
    odd = Verdict(NASTY, "r", (Check(NASTY, -1e-9, 1e9, "%/s"), Check("zero", 0.0, None)))
    labelled = dataclasses.replace(result, name=NASTY, labels={"proxy": NASTY}, verdicts=(*result.verdicts, odd))
    (tmp_path / "tables.tex").write_text(tables_of(labelled))
    (tmp_path / "main.tex").write_text(
        "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n\\input{tables}\n\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert (tmp_path / "main.pdf").stat().st_size > 10_000


def test_a_small_spread_of_a_ratio_is_not_shown_as_none(result: RunResult) -> None:
    """Trap: an 8-bit cache that changes the loss by (2 +- 4) x 1e-5 nats stood there as 1.000 +- 0.000."""
    measured = tuple(
        Metric(f"perplexity.{model}.perplexity", value, "", 64, std, "ppl")
        for model, value, std in (("teacher", 10.0, 1e-4), ("student", 10.0, 2e-4))
    )
    bench = BenchmarkResult("ppl", "perplexity", measured)
    tables = tables_of(dataclasses.replace(result, benchmarks=(bench,), verdicts=()))
    assert r"1.000$\times$ $\pm$ $2.236\times10^{-5}$" in tables
