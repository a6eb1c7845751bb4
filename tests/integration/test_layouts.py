"""The per-head layout from one command, every phase to artifacts, and from scratch beside the latent one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from caramba.model import load_pretrained
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, only_run

WIDTHS = {"k_sem": 4, "k_geo": 12, "v": 16}


def test_every_phase_runs_and_the_cache_is_semantic_geometric_and_value(tmp_path: Path, cache: Path) -> None:
    words = ["model=tiny_dba_per_head", "experiment=smoke", *SMALL, *SMALL_TEACHER]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    metrics = json.loads((run / "artifacts/report.json").read_text())["metrics"]
    bytes_of = {
        name: metrics[f"memory.{name}.kv_bytes_per_token_layer@seq=64,kind=fp16"]["value"]
        for name in ("teacher", "student")
    }
    assert bytes_of == {"teacher": 2 * 128, "student": 2 * (4 + 12 + 16)}
    assert metrics["latency.student.decode_ms@prompt=16,gen=4,batch=1"]["value"] > 0
    model, _ = load_pretrained(run / "checkpoints/global.safetensors")
    projections = "topology.layers.0.layers.0.layers.1.projection"
    shapes = {name: tuple(model.state_dict()[f"{projections}.{name}.weight"].shape) for name in WIDTHS}
    assert shapes == {name: (width, 128) for name, width in WIDTHS.items()}


def test_both_layouts_train_from_scratch_alike(tmp_path: Path, cache: Path) -> None:
    losses = {}
    for model in ("tiny_dba", "tiny_dba_per_head"):
        folder = tmp_path / model
        folder.mkdir()
        words = [f"model={model}", "train=pretrain", "data=stdlib_bytes", "data.max_bytes=400000"]
        sizes = ["train.steps=60", "train.batch_size=4", "train.block_size=64", "train.warmup_steps=10"]
        words += ["verify=none", "benchmark=none"]
        done = caramba([*words, *sizes], folder, cache)
        assert done.returncode == 0, done.stdout + done.stderr
        with (only_run(folder) / "metrics.csv").open() as file:
            losses[model] = [float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")]
    # Batches differ more than steps so near the start: compare the best that each reached.
    assert min(losses["tiny_dba"]) < 0.65 * losses["tiny_dba"][0]
    assert min(losses["tiny_dba"]) < 1.15 * min(losses["tiny_dba_per_head"])


def test_first_tokens_at_full_precision_go_through_every_phase(tmp_path: Path, cache: Path) -> None:
    words = ["model=tiny_dba", "experiment=smoke", *SMALL, *SMALL_TEACHER]
    done = caramba([*words, "model.surgery.exact_first_tokens=4"], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    with (run / "artifacts/memory.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "fp16"]
    # Marginal bytes are the latent's, and the first tokens are 4 layers x 4 tokens x 2 heads x (32 + 32) besides.
    kept = {row["model"]: float(row["first_bytes"]) / int(row["batch"]) for row in rows}
    assert kept == {"teacher": 0.0, "student": 2.0 * 4 * 4 * 2 * (32 + 32)}
    assert {row["model"]: float(row["kv_bytes_per_token_layer"]) for row in rows}["student"] == 2 * (18 + 14)
    moved = {}
    for stage in ("transplant", "global"):
        model, _ = load_pretrained(run / f"checkpoints/{stage}.safetensors")
        moved[stage] = model.state_dict()["topology.layers.0.layers.0.layers.1.projection.first.k.weight"]
    assert not moved["transplant"].equal(moved["global"])  # they train with the queries that read them
