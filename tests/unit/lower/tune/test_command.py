"""`caramba tune` from its words to a table that a run reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba.cli import main
from caramba.layer import attention_backends
from caramba.lower.tune import FAMILIES, BackendCandidate, candidates, measure_family
from caramba.lower.tune.attention import Size
from caramba.lower.tune.timing import LEAST_ROUNDS, Timed, time_interleaved
from caramba.runtime import choose_attention
from caramba.runtime.tuned import PADDED, Family, attention_rows, read_tables, tuning_path, write_table


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    return tmp_path


def test_the_budget_stops_it_and_the_table_is_read_by_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_attention(torch.device("cpu")).order is None
    assert main(["tune", "--device", "cpu", "--seconds", "0.01"]) == 0
    said = capsys.readouterr()
    assert "tune: 0.01 s were enough for 1 of 20 families of shapes; raise --seconds" in said.err
    assert "these rows are cpu only, in float32 on small shapes; varlen, flex, cudnn, efficient and" in said.out
    (row,) = read_tables(tuning_path())["cpu"]["attention"]
    assert set(row["ms"]) == {"flash", "math"}
    assert all(ms > 0 for ms in row["ms"].values())
    fastest = min(row["ms"], key=row["ms"].__getitem__)
    with attention_backends(torch.device("cpu")) as choice:
        assert choice.order is not None
        assert choice.order[0] == ("math" if fastest == "math" else choice.order[0])
        assert choice.order[-1] == "math"
        assert torch.backends.cuda.flash_sdp_enabled() == ("flash" in choice.order)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert main(["tune", "--device", "cpu", "--show"]) == 0
    shown = capsys.readouterr().out
    assert str(tuning_path()) in shown
    assert "64/64 train grouped" in shown
    assert f"cpu: {', '.join(choice.order)}; measured on cpu" in shown
    assert "decode attention: not measured" in shown
    assert f"torch {torch.__version__}" in shown


def test_every_family_has_a_backend_on_a_cpu() -> None:
    small = Size(1, 4, 8, torch.float32)
    for family in FAMILIES:
        row, refused = measure_family(family, torch.device("cpu"), 0.0, small)
        assert set(row.ms) == {item.name for item in candidates(family, torch.device("cpu"))}
        assert row.ms.get("math", row.ms.get("math" + PADDED)) is not None, refused


def test_what_a_backend_refuses_is_said() -> None:
    x = torch.randn(1, 1, 4, 8)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return F.scaled_dot_product_attention(x, x, x)

    calls = [Timed("cudnn", cudnn), Timed("any", lambda: F.scaled_dot_product_attention(x, x, x))]
    times, refused = time_interleaved(calls, torch.device("cpu"), 0.0)
    assert list(times) == ["any"]
    assert len(times["any"]) == LEAST_ROUNDS
    assert "backend" in refused["cudnn"]


def test_documents_are_timed_without_a_mask_on_cuda_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family(72, 48, True, is_masked=True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [item.name for item in candidates(family, cuda)][:3] == ["varlen", "flex", "cudnn"]
    assert not {"varlen", "flex"} & {item.name for item in candidates(replace(family, is_masked=False), cuda)}
    assert not {"varlen", "flex"} & {item.name for item in candidates(family, cpu)}
    ways = [BackendCandidate("varlen", False), BackendCandidate("math", True)]
    monkeypatch.setattr("caramba.lower.tune.attention.candidates", lambda *_: ways)
    row, refused = measure_family(family, cpu, 0.0, Size(1, 4, 8, torch.float32))
    assert row.ms["varlen"] is None
    assert refused["varlen"] == "variable-length attention is for CUDA, not for cpu"
    write_table(tuning_path(), "cpu", {"torch": "any"}, [row])
    assert attention_rows(read_tables(tuning_path())["cpu"]) == [row]
    assert main(["tune", "--device", "cpu", "--show"]) == 0
    shown = capsys.readouterr().out
    assert f"varlen refuses 1 of 1 families: {refused['varlen']}" in shown
    assert "documents by a mask, which is faster than varlen" in shown


def test_out_keeps_other_devices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "mine.json"
    other = {"attention": [], "notes": [1], "machine": {"torch": "1"}}
    out.write_text(json.dumps({"format": 1, "devices": {"GPU": other, "cpu": {**other, "machine": {}}}}))
    assert main(["tune", "--device", "cpu", "--seconds", "0.01", "--out", str(out)]) == 0
    devices = read_tables(out)
    assert devices["GPU"] == other
    assert devices["cpu"]["notes"] == [1]
    assert len(devices["cpu"]["attention"]) == 1
    assert "copy it there, or set CARAMBA_HOME" in capsys.readouterr().out
    assert not tuning_path().exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seconds", "0"], "argument --seconds: got '0', expected a number of seconds above 0"),
        (["--seconds", "nan"], "argument --seconds: got 'nan', expected a number of seconds above 0"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--sconds", "3"], "unrecognized arguments: --sconds 3; see caramba tune --help"),
        (["--out", "."], "--out . is a folder, expected a file; use --out tuned.json"),
        (["--out", "none.json", "--show"], "--out none.json: no such file to show"),
        (
            ["--out", "broken.json"],
            "broken.json: not a table of caramba tune (ValueError: format 9, expected 1); delete",
        ),
        (
            ["--out", "broken.json/tuned.json"],
            "tune: broken.json/tuned.json cannot be written (File exists); give another file by --out",
        ),
    ],
)
def test_bad_arguments(
    words: list[str],
    text: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("caramba.launch.commands.tune.tune_attention", lambda *_: pytest.fail("measured all the same"))
    broken = '{"format": 9, "devices": {}}'
    (folder / "broken.json").write_text(broken)
    assert main(["tune", "--device", "cpu", *words]) == 2
    assert text in capsys.readouterr().err
    assert not tuning_path().exists()
    assert (folder / "broken.json").read_text() == broken


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--device", "cuda"]) == 2
    assert "'cuda' is not available here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    assert main(["tune", "--device", "cuda", "--seconds", "20"]) == 0
    with attention_backends(torch.device("cuda")) as choice:
        assert choice.order is not None
        assert str(tuning_path()) in choice.source
