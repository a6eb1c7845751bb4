"""A run that is killed and resumed leaves every metrics stream with every step once, as a run that was not stopped."""

from __future__ import annotations

import csv
import json
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from caramba.data.checkpoint import load_tensors
from tests.integration.commands import caramba, interrupt_when, only_run

WORDS = [
    *("launch", "model=tiny", "train=pretrain", "verify=none", "benchmark=none"),
    *("data.max_bytes=400000", "data.vocab_size=512", "model.embedder.vocab_size=512"),
    *(
        "train.steps=60",
        "train.batch_size=2",
        "train.block_size=32",
        "train.eval_every=20",
        "train.save_every=20",
    ),
    *("settings.instrument=[none,hdf5,tensorboard,wandb]", "settings.peak_tflops=0.1"),
]
STEPS = [10, 20, 30, 40, 50, 60]
RATES = ("tokens_per_s", "mfu", "data_wait_share", "peak_resident_bytes")  # these differ from run to run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, Path]:
    """A profiled run of one process that loads its data itself; one with four workers, killed with rows beyond its state."""
    whole, killed = (tmp_path_factory.mktemp(name) for name in ("whole", "killed"))
    words = [*WORDS, "train.num_workers=4"]
    with ThreadPoolExecutor() as threads:
        beside = threads.submit(caramba, [*WORDS, "debug=profile", "debug.max_steps=60"], whole, cache)
        status = interrupt_when("runs/*/*/events.jsonl", words, killed, cache, signal.SIGKILL, '"step": 50')
        done = beside.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert status == -signal.SIGKILL
    run = only_run(killed)
    assert not (run / "result.json").exists()
    with open(run / "events.jsonl", "a") as file:
        file.write('{"time": 1, "event": "met')  # what a full disk leaves
    done = caramba(["resume", str(run)], killed, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(whole), run


def test_the_weights_are_those_of_the_uninterrupted_run(runs: tuple[Path, Path]) -> None:
    whole, killed = (load_tensors(run / "checkpoints" / "pretrain.safetensors") for run in runs)
    assert [key for key in whole if not torch.equal(whole[key], killed[key])] == []


def rows_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "metrics"]


def test_jsonl_and_csv_have_every_step_once(runs: tuple[Path, Path]) -> None:
    whole, killed = (
        [(row["step"], {k: v for k, v in row["values"].items() if k not in RATES}) for row in rows_of(run)]
        for run in runs
    )
    assert whole == killed
    assert [step for step, values in whole if "loss" in values] == STEPS
    assert [step for step, values in whole if "val_loss" in values] == [20, 40, 60]
    with open(runs[1] / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table] == STEPS
    assert all(0 < float(row["mfu"]) < 1 and 0 <= float(row["data_wait_share"]) <= 1 for row in table)
    assert [row["update_norm"] != "" for row in table] == [step in (50, 60) for step in STEPS]


def test_hdf5_has_what_the_events_have(runs: tuple[Path, Path]) -> None:
    for run in runs:
        with h5py.File(run / "metrics.h5", "r", libver="latest", swmr=True) as file:
            phase = file["pretrain"]
            expected = {row["step"]: row["values"] for row in rows_of(run) if "loss" in row["values"]}
            assert phase["loss"]["step"].tolist() == STEPS
            assert phase["loss"]["value"].tolist() == [expected[step]["loss"] for step in STEPS]
            assert phase["val_loss"]["step"].tolist() == [20, 40, 60]
            norms = phase["layer_grad_norm"]
            layers = norms.attrs["layers"]
            assert norms["values"].shape == (2, len(layers))
            last = [expected[60][f"layer_grad_norm/{layer}"] for layer in layers]
            assert norms["values"][-1].tolist() == last


def test_tensorboard_has_every_step_once(runs: tuple[Path, Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run in runs:
        events = EventAccumulator(str(run / "tensorboard" / "pretrain"))
        events.Reload()
        assert [item.step for item in events.Scalars("loss")] == STEPS
        assert [item.step for item in events.Scalars("val_loss")] == [20, 40, 60]


def wandb_records(file: Path) -> Iterator[bytes]:
    """Read the records of an offline run: W&B's header of 7 bytes, then blocks of 32 KiB of LevelDB's log."""
    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # what is left of a block holds no header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_offline_has_every_step_once(runs: tuple[Path, Path]) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    for run in runs:
        (folder,) = (run / "wandb").glob("offline-run-*")
        assert folder.name.endswith(f"{run.name}-pretrain"), "the id is that of the run"
        (file,) = folder.glob("*.wandb")
        seen: list[tuple[int, set[str]]] = []
        for data in wandb_records(file):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                seen.append((int(items["_step"]), set(items)))
        assert [step for step, _ in seen] == STEPS
        assert all("loss" in keys and "tokens_per_s" in keys for _, keys in seen)
        assert [step for step, keys in seen if "val_loss" in keys] == [20, 40, 60]


def test_the_report_has_the_speed_of_the_phase(runs: tuple[Path, Path]) -> None:
    for run in runs:
        report = json.loads((run / "artifacts" / "report.json").read_text())
        measured = report["phases"][0]["details"]["measured"]
        assert measured["steps_measured"] >= 40
        assert np.isclose(
            measured["mfu"] / measured["tokens_per_s"],
            rows_of(run)[0]["values"]["mfu"] / rows_of(run)[0]["values"]["tokens_per_s"],
        )
        assert "Training speed of" in (run / "artifacts" / "report.html").read_text()


def test_a_profiled_run_has_a_trace_and_its_top_ops(runs: tuple[Path, Path]) -> None:
    folder = runs[0] / "profile" / "pretrain"
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert len({event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}) == 3
    with open(folder / "top_ops.csv") as file:
        assert "aten::mm" in {row["name"] for row in csv.DictReader(file)}
    assert "mean of 3 steps" in (folder / "top_ops.txt").read_text()
    assert not (runs[1] / "profile").exists()
