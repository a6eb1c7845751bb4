"""One manifest that trains the four attentions from scratch at matched parameters, each with its checkpoint and row."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import yaml

from caramba.data.checkpoint import load_tensors, read_metadata
from tests.integration.commands import caramba, only_run

NAMES = ("baseline", "gqa", "bottleneck", "decoupled")


def manifest(**changes: object) -> dict[str, object]:
    norm = {"type": "RMSNormLayer", "d_model": 64}
    attention = {"type": "AttentionLayer", "d_model": 64, "n_heads": 4, "head_dim": 16}
    feed_forward = {"type": "SwiGLULayer", "d_model": 64, "d_ff": 160}
    block = [
        {"type": "ResidualTopology", "layers": [norm, attention]},
        {"type": "ResidualTopology", "layers": [norm, feed_forward]},
    ]
    train = {"phase": "pretrain", "batch_size": 4, "block_size": 64, "lr": 0.003}
    return {
        "name": "study",
        "model": {
            "embedder": {"vocab_size": 512, "d_model": 64},
            "topology": {
                "type": "StackedTopology",
                "layers": [{"type": "NestedTopology", "repeat": 2, "layers": block}, norm],
            },
        },
        "data": {"type": "stdlib", "max_bytes": 400000, "vocab_size": 512},
        "runs": [{"id": name, "exp": name, "steps": 12, "train": train} for name in NAMES],
        "benchmarks": [
            {"id": "ppl", "config": {"type": "perplexity", "block_size": 64, "num_batches": 2}},
            {"id": "bytes", "config": {"type": "memory", "sequence_lengths": [32]}},
        ],
    } | changes


def test_the_four_attentions_train_on_the_same_tokens_and_share_the_tables(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(manifest()))
    planned = caramba(["compile", "manifest=study.yaml"], tmp_path, cache)
    assert planned.returncode == 0, planned.stderr
    assert "bottleneck at " in planned.stdout
    done = caramba(["manifest=study.yaml", "settings.instrument=none"], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    report = json.loads((run / "artifacts/report.json").read_text())
    phases = {phase["id"]: phase for phase in report["phases"]}
    assert list(phases) == list(NAMES)
    assert {phase["tokens"] for phase in phases.values()} == {12 * 4 * 64}
    for name, phase in phases.items():
        file = run / f"checkpoints/{name}.safetensors"
        weights = load_tensors(file)
        params = sum(weight.numel() for key, weight in weights.items() if "inv_freq" not in key)
        assert params == phase["details"]["params"]
        assert abs(params / phases["baseline"]["details"]["params"] - 1) < 0.02
        assert read_metadata(file)["role"] == "variant"
        bytes_key = f"memory.{name}.kv_bytes_per_token@seq=32,kind=fp16"
        assert report["metrics"][bytes_key]["value"] == phase["details"]["kv_bytes_per_token"]
    with open(run / "artifacts/perplexity.csv") as lines:
        rows = {row["model"]: float(row["perplexity"]) for row in csv.DictReader(lines)}
    assert list(rows) == list(NAMES), "no row of a student that was not trained"
    assert len(set(rows.values())) == 4
    assert "caramba-variants" in (run / "artifacts/tables.tex").read_text()

    again = caramba(["resume", str(run)], tmp_path, cache)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "step 12" not in again.stdout


def test_what_a_variant_cannot_be_is_refused(tmp_path: Path, cache: Path) -> None:
    def refusal(**run: object) -> str:
        train = {"phase": "pretrain", "steps": 2}
        file = tmp_path / "bad.yaml"
        file.write_text(yaml.safe_dump(manifest(runs=[{"id": "a", "exp": "gqa", "train": train} | run])))
        done = caramba(["manifest=bad.yaml"], tmp_path, cache)
        assert done.returncode == 2, done.stdout
        return done.stderr

    assert "exp=gqa trains a model of its own from scratch" in refusal(train={"phase": "global", "steps": 2})
    assert "expected 'baseline', 'gqa', 'bottleneck' or 'decoupled'" in refusal(exp="gqqa")
    assert "exp=gqa has no teacher" in refusal(verify=[{"type": "compare"}])
