"""From one command to artifacts, and from a given teacher to a student."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import pytest
import torch

from caramba.data.checkpoint import load_tensors
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, only_run

STAGES = (
    "teacher",
    "student",
    "student_transplant",
    "student_blockwise",
    "student_drift",
    "student_global",
    "teacher_continued",
)


@pytest.fixture(scope="module")
def upcycled(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("upcycle")
    done = caramba(["experiment=smoke", *SMALL, *SMALL_TEACHER], folder, cache, is_fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder)


def test_report_has_every_key_and_its_hashes_hold(upcycled: Path) -> None:
    report = json.loads((upcycled / "artifacts/report.json").read_text())
    assert report["schema"] == 1
    assert report["run_id"] == upcycled.name
    wanted = {
        f"perplexity.{stage}.{key}"
        for stage in STAGES
        for key in ("nll", "perplexity", "bits_per_byte", "unique_tokens")
    }
    wanted |= {
        f"latency.{model}.{key}@prompt=16,gen=4,batch=1"
        for model in ("teacher", "student")
        for key in ("prefill_ms", "decode_ms", "ttft_ms", "itl_ms", "tok_s")
    }
    wanted |= {
        f"memory.{model}.{key}@seq=64,kind=fp16"
        for model in ("teacher", "student")
        for key in ("kv_bytes_per_token", "kv_bytes_per_token_layer", "model_bytes", "peak_bytes")
    }
    wanted |= {"ratio.perplexity", "verify.fidelity.delta_nll", "verify.compare.logits_mean_l1"}
    assert wanted <= set(report["metrics"]), wanted - set(report["metrics"])
    assert all(
        set(metric) == {"value", "unit", "n", "std", "standard_error", "source"}
        for metric in report["metrics"].values()
    )
    assert report["labels"]["proxy"].startswith("trained from scratch")
    names = {
        "perplexity.csv",
        "latency.csv",
        "memory.csv",
        "summary.png",
        "latency_vs_context.png",
        "memory_scaling.png",
        "tables.tex",
        "report.html",
    }
    assert names <= {item["path"] for item in report["artifacts"]}
    for item in report["artifacts"]:
        assert hashlib.sha256((upcycled / "artifacts" / item["path"]).read_bytes()).hexdigest() == item["sha256"]


def test_cache_is_the_latent_and_the_geometric_key(upcycled: Path) -> None:
    metrics = json.loads((upcycled / "artifacts/report.json").read_text())["metrics"]
    manifest = json.loads((upcycled / "manifest.json").read_text())
    student = metrics["memory.student.kv_bytes_per_token_layer@seq=64,kind=fp16"]["value"]
    teacher = metrics["memory.teacher.kv_bytes_per_token_layer@seq=64,kind=fp16"]["value"]
    attention = manifest["model"]["topology"]["layers"][0]["layers"][0]["layers"][1]
    assert (attention["layout"], attention["v_dim"]) == ("latent", None)
    assert student == 2 * (attention["sem_dim"] + attention["geo_dim"]) == 2 * (18 + 14)
    assert teacher == 2 * 128
    name = "topology.layers.0.layers.0.layers.1.projection.v_up"
    assert load_tensors(upcycled / "checkpoints/global.safetensors")[name].shape == (4, 18, 32)


def test_final_student_is_the_global_phases_student(upcycled: Path) -> None:
    metrics = json.loads((upcycled / "artifacts/report.json").read_text())["metrics"]
    assert metrics["perplexity.student.nll"]["value"] == metrics["perplexity.student_global.nll"]["value"]


def test_run_directory_holds_what_it_should(upcycled: Path) -> None:
    for name in (
        "manifest.json",
        "env.json",
        "overrides.txt",
        "plan.json",
        "metrics.csv",
        "events.jsonl",
        "result.json",
    ):
        assert (upcycled / name).is_file(), name
    weights = {file.stem for file in (upcycled / "checkpoints").glob("*.safetensors")}
    assert weights == {"pretrain", "transplant", "blockwise", "drift", "global", "teacher_continued"}
    rows = list(csv.DictReader((upcycled / "metrics.csv").open()))
    assert {row["phase"] for row in rows} == {"pretrain", "blockwise", "drift", "global", "teacher_continued"}
    plan = json.loads((upcycled / "plan.json").read_text())
    assert all(item["decisions"]["device"]["reason"] for item in plan.values())


def test_a_run_serves_as_teacher(upcycled: Path, tmp_path: Path, cache: Path) -> None:
    words = [
        "experiment=smoke",
        "train=blockwise",
        f"model.teacher.checkpoint={upcycled}",
        *SMALL,
        *SMALL_TEACHER,
    ]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((only_run(tmp_path) / "artifacts/report.json").read_text())["metrics"]
    before = json.loads((upcycled / "artifacts/report.json").read_text())["metrics"]
    assert metrics["perplexity.teacher.nll"]["value"] == before["perplexity.teacher.nll"]["value"]
    assert "perplexity.student_blockwise.nll" in metrics


def test_teacher_of_another_shape_is_refused(upcycled: Path, tmp_path: Path, cache: Path) -> None:
    words = [
        "experiment=smoke",
        "train=blockwise",
        f"model.teacher.checkpoint={upcycled}",
        *SMALL,
        *SMALL_TEACHER,
    ]
    done = caramba(
        [*words, "model.teacher.manifest.topology.layers.0.repeat=3", "model.topology.layers.0.repeat=3"],
        tmp_path,
        cache,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "holds another network than the manifest describes" in done.stderr


def test_teacher_of_another_tokenizer_is_refused(upcycled: Path, tmp_path: Path, cache: Path) -> None:
    words = [
        "experiment=smoke",
        "train=blockwise",
        f"model.teacher.checkpoint={upcycled}",
        *SMALL,
        *SMALL_TEACHER,
    ]
    done = caramba([*words, "data.vocab_size=400"], tmp_path, cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "tokenizer" in done.stderr or "vocab" in done.stderr


def test_a_failing_benchmark_loses_nothing_else(upcycled: Path, tmp_path: Path, cache: Path) -> None:
    words = [
        "experiment=smoke",
        "train=none",
        f"model.checkpoint={upcycled}",
        f"model.teacher.checkpoint={upcycled}",
    ]
    done = caramba(
        [
            *words,
            *SMALL,
            *SMALL_TEACHER,
            "benchmark.benchmarks.1.config.batch_sizes=[1000000000000]",
            "verify=none",
        ],
        tmp_path,
        cache,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((only_run(tmp_path) / "artifacts/report.json").read_text())
    assert [item["id"] for item in report["failures"]] == ["latency"]
    assert "memory" in report["failures"][0]["error"]
    assert "memory.student.kv_bytes_per_token@seq=64,kind=fp16" in report["metrics"]


def test_fail_fast_stops_after_the_artifacts(upcycled: Path, tmp_path: Path, cache: Path) -> None:
    words = [
        "experiment=smoke",
        "train=blockwise",
        f"model.teacher.checkpoint={upcycled}",
        *SMALL,
        *SMALL_TEACHER,
    ]
    done = caramba([*words, "verify.checks.1.max_ppl_ratio=0.001", "verify.checks.1.fail_fast=true"], tmp_path, cache)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ppl_ratio" in done.stderr
    report = json.loads((only_run(tmp_path) / "artifacts/report.json").read_text())
    assert any(not item["passed"] for verdict in report["verify"] for item in verdict["checks"])


def test_bytes_and_a_single_model(tmp_path: Path, cache: Path) -> None:
    words = [
        "model=tiny",
        "train=pretrain",
        "data=stdlib_bytes",
        "data.max_bytes=300000",
        "model.embedder.vocab_size=257",
    ]
    done = caramba(["experiment=smoke", *words], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((only_run(tmp_path) / "artifacts/report.json").read_text())
    metrics = report["metrics"]
    nll, bpb = (
        metrics["perplexity.student.nll"]["value"],
        metrics["perplexity.student.bits_per_byte"]["value"],
    )
    assert bpb == pytest.approx(nll / 0.6931, rel=0.02), "a byte is a token, but for the end marks"
    assert "perplexity.teacher.nll" not in metrics
    assert "proxy" not in report["labels"], "there is no teacher to stand for another"
    assert "proxy" not in done.stdout
    # As the teacher of another run it does stand for one, whether that run reads it or what was exported of it.
    run, folder = only_run(tmp_path), tmp_path / "exported"
    done = caramba(["export", str(run), "--format", "hf", "--out", str(folder)], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, teacher in (("of_run", run), ("of_export", folder)):
        of_teacher = ["data=stdlib_bytes", "data.max_bytes=300000", f"model.teacher.checkpoint={teacher}"]
        of_teacher += ["model=tiny_dba", "model.embedder.vocab_size=257", "train=none", "verify=none"]
        of_teacher += ["model.teacher.manifest.embedder.vocab_size=257", f"name={name}"]
        done = caramba(["experiment=smoke", *of_teacher], tmp_path, cache)
        assert done.returncode == 0, done.stdout + done.stderr
        written = next((tmp_path / "runs" / name).iterdir()) / "artifacts"
        labels = json.loads((written / "report.json").read_text())["labels"]
        assert labels["proxy"].startswith("trained from scratch on")
        assert "Proxy teacher: trained from scratch on" in (written / "tables.tex").read_text()


def test_a_seed_of_a_phase_takes_effect(tmp_path: Path, cache: Path) -> None:
    words = ["experiment=smoke", "model=tiny", "train=pretrain", "benchmark=none", *SMALL]
    weights = []
    for seed in (1, 2, 1):
        folder = tmp_path / str(len(weights))
        folder.mkdir()
        done = caramba([*words, f"train.phases.pretrain.seed={seed}"], folder, cache)
        assert done.returncode == 0, done.stdout + done.stderr
        weights.append(load_tensors(only_run(folder) / "checkpoints/pretrain.safetensors"))
    first, other, again = (item["embedder.token.weight"] for item in weights)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_diverged_training_saves_nothing_and_says_so(tmp_path: Path, cache: Path) -> None:
    words = [
        "experiment=smoke",
        "model=tiny",
        "train=pretrain",
        "train.lr=1e38",
        "train.max_grad_norm=null",
        *SMALL,
    ]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the gradient's norm" in done.stderr
    assert not list(only_run(tmp_path).glob("checkpoints/*.safetensors"))


def test_a_group_cannot_build_on_another_groups_teacher(tmp_path: Path, cache: Path) -> None:
    printed = caramba(["launch", "experiment=smoke", *SMALL, *SMALL_TEACHER, "--cfg", "job"], tmp_path, cache).stdout
    assert "phases" in printed
    import yaml

    tree = yaml.safe_load(printed)
    model = {key: value for key, value in tree["model"].items() if value is not None}
    sizes = {"steps": 2, "batch_size": 2, "block_size": 64}
    data = {"type": "stdlib", "tokenizer": "bpe", "vocab_size": 512, "max_bytes": 400000}
    manifest = {
        "version": 1,
        "name": "two_groups",
        "model": model,
        "data": data,
        "groups": [
            {
                "name": "one",
                "runs": [{"id": "pretrain", "train": {"phase": "pretrain", "trains": "teacher", **sizes}}],
            },
            {"name": "two", "runs": [{"id": "blockwise", "train": {"phase": "blockwise", **sizes}}]},
        ],
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(manifest))
    refused = caramba(["run", "two.yaml"], tmp_path, cache)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "needs the teacher's weights" in refused.stderr
    done = caramba(["run", "two.yaml", "--group", "one"], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transplant" not in done.stdout


def test_data_that_does_not_fit_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.tokens").write_text("1 2 x 4")
    words = ["experiment=smoke", "model=tiny", "train=pretrain", "data=tokens", "data.path=bad.tokens"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "'x'" in done.stderr
    assert not list(tmp_path.glob("runs/*/*"))
