"""Hugging Face folders and hub ids on the command line: what is derived, refused, found in the cache, and recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from caramba import launch as caramba_launch
from caramba.config.hf import spec_of_folder
from caramba.config.manifest import Manifest
from caramba.config.model import SurgeryConfig
from caramba.config.topology import attention_configs
from caramba.data.checkpoint.hub import cached_folder
from caramba.errors import CheckpointError, ConfigError
from caramba.infer.model_bundle import load_model
from caramba.launch.freeze import freeze
from caramba.launch.preflight import check_weights, find_checkpoint
from caramba.layer.rope import rope_frequencies
from caramba.model import build_model, load_pretrained
from caramba.surgery import check_models
from tests.integration.commands import caramba, only_run
from tests.unit.hf.folders import write

LOAD_ONLY = ("train=none", "benchmark=none")
HUB_ID = "someone/tiny-llama"


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny-llama"
    write(folder, "llama31_gqa", shard="20KB")
    return folder


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of the shape of tiny_dba's teacher, with another vocabulary."""
    folder = tmp_path_factory.mktemp("hf") / "tiny-llama"
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).save_pretrained(folder)
    return folder


@pytest.fixture
def snapshot(written: Path, tmp_path: Path) -> Path:
    home = tmp_path / "hub" / "models--someone--tiny-llama"
    shutil.copytree(written, home / "snapshots" / "abc123")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc123")
    return home / "snapshots" / "abc123"


def manifest_of(*words: str) -> Manifest:
    return freeze(list(words)).manifest


def test_a_path_describes_the_model(written: Path) -> None:
    model = check_weights(manifest_of("model=hf", f"model.path={written}", *LOAD_ONLY)).model
    assert model.name == "tiny-llama"
    assert model.path == str(written)
    assert model.topology == spec_of_folder(written).topology
    assert Manifest.model_validate_json(manifest_of("model=hf", f"model.path={written}", *LOAD_ONLY).model_dump_json())


def test_a_path_may_be_relative_and_a_name_given(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "here")
    model = check_weights(manifest_of("model=hf", "model.path=here", "model.name=mine", *LOAD_ONLY)).model
    assert (model.name, model.path) == ("mine", str(tmp_path / "here"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model=hf"], r"^model.path: required, and still '\?\?\?'"),
        (["model=hf", "model.path={}", "model.embedder.vocab_size=5"], r"model.embedder: follows from config.json of model.path=.*\(command line: model.embedder.vocab_size=5\); remove it"),
        (["model=hf", "model.path={}", "+model.head.tied=true"], r"model.head: follows from config.json"),
        (["model=tiny", "+model.path={}"], r"model.embedder: follows from config.json .*conf/model/tiny.yaml:3.*model=hf"),
        (["model=hf", "model.path={}", "+model.checkpoint=x"], r"path and checkpoint both give this model its weights"),
    ],
)  # fmt: skip
def test_keys_beside_a_path_are_refused(words: list[str], text: str, written: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        manifest_of(*(word.format(written) for word in words), *LOAD_ONLY)


@pytest.mark.parametrize(
    ("path", "text"),
    [("nowhere", "model.path=nowhere: no such folder; give a Hugging Face folder, or a hub id"), (".", "has no config.json")],
)  # fmt: skip
def test_a_path_that_is_no_model(path: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        manifest_of("model=hf", f"model.path={path}", *LOAD_ONLY)


@pytest.mark.parametrize(
    ("words", "key"),
    [(["model=hf", *LOAD_ONLY], "model.path"), (["model=hf_dba", "train=blockwise"], "model.teacher.checkpoint")],
)  # fmt: skip
def test_a_missing_run_or_a_file_is_not_looked_for_on_the_hub(words: list[str], key: str, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "a.safetensors").write_bytes(b"")
    for text, said in (
        ("runs/nope", "no such folder"),
        ("weights/a.safetensors", "this is a file, and a folder is"),
    ):
        with pytest.raises(CheckpointError, match=f"^{key}={text}: {said}.* give a Hugging Face folder"):
            manifest_of(*words, f"{key}={text}")


def test_a_student_with_widths_per_head(tmp_path: Path) -> None:
    write(tmp_path / "llama31_gqa", "llama31_gqa")
    widths = ("model.surgery.layout=per_head", "model.surgery.sem_dim=4", "model.surgery.geo_dim=4")
    words = ("model=hf_dba", f"model.teacher.checkpoint={tmp_path / 'llama31_gqa'}", "train=blockwise")
    layers = list(attention_configs(check_weights(manifest_of(*words, *widths)).model.topology))
    assert [layer.dims().streams for layer in layers] == [
        (("k_sem", 2, 2), ("k_geo", 2, 2), ("v", 2, 8)),
    ] * 2, "values as wide as the teacher's, unless v_dim is given"


@pytest.mark.usefixtures("blank_figures")
def test_a_student_with_memory_slots_keeps_heads_and_rope_and_trains_its_gates(
    teacher_folder: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 61, 20_000, dtype=np.uint16))
    sizes = ("model.surgery.local_window=8", "model.surgery.memory_slots=6")
    words = ("model=hf_memory", f"model.teacher.checkpoint={teacher_folder}", "train=blockwise", *sizes)
    training = (
        "train.steps=8",
        "train.batch_size=2",
        "train.block_size=32",
        "data=tokens",
        "data.path=tokens.npy",
    )
    run = caramba_launch([*words, *training, "device=cpu", "benchmark=none", "verify=none"], quiet=True)
    layers = attention_configs(run.manifest.model.topology)
    assert [(layer.type, layer.local_window, layer.dims().n_kv_heads) for layer in layers] == [
        ("MemoryBankLayer", 8, 2)
    ] * 4
    assert run.manifest.model.name == "tiny-llama_memory"
    student, _ = load_pretrained(run.path / run.report["phases"][-1]["checkpoint"])
    stats = student.get_memory_stats(torch.arange(32)[None] % 61)
    assert 0 < stats["memory_mass"] < 1
    with pytest.raises(ConfigError, match="memory_slots=4 is of method=memory"):
        manifest_of("model=tiny_dba", "+model.surgery.memory_slots=4", "train=blockwise")


@pytest.mark.usefixtures("blank_figures")
def test_the_memory_experiment_measures_what_the_window_costs_its_teacher_and_the_student(
    tmp_path: Path,
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).save_pretrained("teacher")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 61, 8_000, dtype=np.uint16))
    words = ("experiment=smollm2_memory", "model.teacher.checkpoint=teacher")
    data = ("data=tokens", "data.path=tokens.npy", "data.val_frac=0.3", "device=cpu")
    (group,) = manifest_of(*words, "data=tokens", "data.path=tokens.npy").groups
    assert [bench.config.type for bench in group.benchmarks] == ["memory_gap", "memory"]
    assert [run.train.block_size for run in group.runs if run.train] == [8192, 8192]
    sizes = ("model.surgery.local_window=8", "model.surgery.memory_slots=6", "train.dtype=float32")
    sizes += ("train.steps=3", "train.warmup_steps=1", "train.batch_size=2", "train.block_size=64")
    gap = "{id: gap, config: {type: memory_gap, block_size: 64, windows: 8, start: 16, min_gain: 1.0e-9}}"
    run = caramba_launch([*words, *data, *sizes, "verify=none", f"benchmark.benchmarks=[{gap}]"], quiet=True)
    metrics = {key: metric["value"] for key, metric in run.report["metrics"].items()}
    assert abs(metrics["memory_gap.teacher.gain@window=8,from=16,length=64"]) < 1
    assert abs(metrics["memory_gap.student.near@window=8"]) < 1e-6, "the teacher's weights stay as they are"
    student, _ = load_pretrained(run.path / run.report["phases"][-1]["checkpoint"])
    theirs = load_model(str(tmp_path / "teacher"), with_tokenizer=False).model.state_dict()
    start, ours = build_model(student.spec, seed=run.manifest.seed).state_dict(), student.state_dict()
    gates = set(ours) - set(theirs)
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert gates
    assert all(
        ("_gate" in name or name.endswith("slot_bias")) and not torch.equal(ours[name], start[name]) for name in gates
    )
    closed = "memory_gap.student.closed@window=8,from=16,length=64"
    has_gain = metrics["memory_gap.teacher.gain@window=8,from=16,length=64"] > 1e-9
    assert (closed in metrics) == has_gain


def test_a_teacher_folder_describes_the_teacher(teacher_folder: Path, written: Path) -> None:
    words = ["model=tiny_dba", "model.teacher.manifest=null", f"model.teacher.checkpoint={teacher_folder}"]
    with pytest.raises(ConfigError, match=r"vocab_size=2048 differs from .*=61"):
        manifest_of(*words, "train=finetune")
    manifest = check_weights(manifest_of(*words, "model.embedder.vocab_size=61", "train=finetune"))
    teacher = manifest.model.teacher
    assert teacher is not None
    assert teacher.checkpoint == str(teacher_folder)
    assert teacher.manifest == spec_of_folder(teacher_folder)
    with pytest.raises(ConfigError, match="the student has 4 attention layers, its teacher 2; make them equal"):
        manifest_of(
            *words[:2],
            f"model.teacher.checkpoint={written}",
            "model.embedder.vocab_size=61",
            "train=finetune",
        )


@pytest.mark.parametrize("name", ["llama2_mha", "llama32_3b_mqa", "llama_biases", "mistral_window", "qwen2_window"])
def test_a_student_follows_from_its_teachers_folder(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, name)
    words = ["model=hf_dba", f"model.teacher.checkpoint={tmp_path / name}", "train=blockwise"]
    model = check_weights(manifest_of(*words)).model
    teacher = spec_of_folder(tmp_path / name)
    assert model.name == f"{name}_dba"
    assert (model.embedder, model.head) == (teacher.embedder, teacher.head)
    pairs = list(zip(attention_configs(teacher.topology), attention_configs(model.topology), strict=True))
    for theirs, ours in pairs:
        assert (ours.mode, ours.layout) == ("decoupled", "latent")
        assert (ours.bias, ours.local_window) == (theirs.bias, theirs.local_window)
        cached = theirs.dims().cached
        assert (ours.sem_dim, ours.geo_dim) == (cached // 8, cached // 16 // 2 * 2)
    check_models(build_model(teacher, device="meta"), build_model(model, device="meta"), SurgeryConfig(method="dba"))
    widths = ("model.surgery.sem_dim=4", "model.surgery.geo_dim=2")
    fewer = manifest_of(*words, *widths).model
    assert {(layer.sem_dim, layer.geo_dim) for layer in attention_configs(fewer.topology)} == {(4, 2)}


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("qwen3", [], "the teacher's qk_norm cannot be transplanted: it normalises each key by its own length"),
        ("llama_dynamic", [], "rope_scaling type=dynamic changes its frequencies with the length"),
        ("llama31_gqa", ["model.surgery.geo_dim=3"], "even width per head, got 3; set geo_dim to 2 or 4"),
        ("llama31_gqa", ["+model.head.tied=true"], "model.head: follows from the teacher, as model.topology does"),
        ("llama31_gqa", ["model.surgery.kv_budget_bytes=5"], "the nearest possible is 12"),
        ("llama31_gqa", ["model.surgery.sem_dim=0"], r"model.surgery.sem_dim: .*greater than"),
        ("llama31_gqa", ["model.surgery.geo_dim=0"], r"model.surgery.geo_dim: .*greater than"),
        ("qwen2", ["model.surgery.target=mla"], "bias=qkv is not part of multi-head latent attention .*surgery.target: caramba"),
        ("mistral_window", ["model.surgery.target=mla"], "local_window=5 is not part of .* set local_window: null"),
        ("llama31_gqa", ["model.surgery.target=mla", "model.surgery.kv_budget_bytes=64"], "target: caramba"),
        ("llama31_gqa", ["model.surgery.target=mla", "model.surgery.exact_first_tokens=4"], "set exact_first_tokens: 0"),
        ("llama31_gqa", ["model.surgery.layout=''"], r"model.surgery.layout: .*'per_head' or 'latent'"),
        ("llama31_gqa", ["model.surgery.layout=per_head"], r"^model.surgery.sem_dim, geo_dim: layout=per_head has no default widths \(command line: model.surgery.layout=per_head\); set them, to multiples of the 2"),
        ("llama31_gqa", ["model.surgery.layout=per_head", "model.surgery.sem_dim=4"], "^model.surgery.geo_dim: layout=per_head"),
    ],
)  # fmt: skip
def test_a_student_that_cannot_follow_is_refused_before_any_work(
    name: str, words: list[str], text: str, tmp_path: Path
) -> None:
    write(tmp_path / name, name)
    with pytest.raises(ConfigError, match=text):
        manifest_of("model=hf_dba", f"model.teacher.checkpoint={tmp_path / name}", "train=blockwise", *words)


def test_a_student_for_engines_has_every_nth_of_its_teachers_frequencies(tmp_path: Path) -> None:
    write(tmp_path / "smollm", "llama2_mha")  # heads of 8: 4 pairs
    words = ["model=hf_dba", f"model.teacher.checkpoint={tmp_path / 'smollm'}", "train=blockwise"]
    for geo, taken in ((8, (0, 1, 2, 3)), (6, (0, 1, 2)), (4, (0, 3)), (2, (0,))):
        chosen = ("model.surgery.target=mla", f"model.surgery.geo_dim={geo}")
        layer = attention_configs(manifest_of(*words, *chosen).model.topology)[0]
        assert (layer.mla, layer.exact_first_tokens, layer.rope_scaling) == (True, 0, None)
        ours, theirs = rope_frequencies(geo, layer.rope_base), rope_frequencies(8, 10000.0)
        torch.testing.assert_close(ours, theirs[list(taken)])


def test_a_student_for_engines_distils_and_decodes(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "llama", "llama31_gqa")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 61, 20_000).astype(np.int32))
    words = ["launch", "model=hf_dba", "model.teacher.checkpoint=llama", "model.surgery.target=mla"]
    words += ["train=blockwise", "train.steps=2", "train.batch_size=2", "train.block_size=32", "data=tokens"]
    words += ["data.path=ids.npy", "device=cpu", "verify=none", "model.surgery.geo_dim=8"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr


def test_text_that_promises_no_good_student_is_named_before_training(tmp_path: Path, cache: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 257}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).save_pretrained(tmp_path / "llama")
    words = ["launch", "model=hf_dba", "model.teacher.checkpoint=llama", "train=blockwise", "train.steps=40"]
    words += ["train.batch_size=32", "train.block_size=32", "data=stdlib_bytes", "data.max_bytes=20000"]
    words += ["data.val_frac=0.2", "device=cpu", "benchmark=none", "verify=none"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = " ".join((done.stdout + done.stderr).split())
    assert "llama has no tokenizer.json" in printed
    assert "the phases read 81,920 tokens" in printed
    assert "bits a byte in windows of 32 tokens" in printed


def test_a_qwen_folder_becomes_a_student_that_distils_and_decodes(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "qwen2", "qwen2")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 61, 20_000).astype(np.int32))
    words = ["launch", "model=hf_dba", "model.teacher.checkpoint=qwen2", "train=blockwise", "train.steps=2"]
    words += ["train.batch_size=2", "train.block_size=32", "data=tokens", "data.path=ids.npy", "device=cpu"]
    words += ["benchmark=none", "verify=none", "model.surgery.sem_dim=32", "model.surgery.geo_dim=16"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    report = json.loads((run / "artifacts" / "report.json").read_text())["transplant"]
    assert [(layer["cached"], layer["teacher_cached"]) for layer in report["layers"]] == [(48, 32)] * 2
    assert report["unmapped_teacher"] == []
    assert max(layer["error"] for layer in report["layers"]) < 1e-5, "whole width: biases are mapped"
    tokens = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2", dtype=torch.float32)
    with torch.no_grad():
        student = load_pretrained(run / "checkpoints" / "transplant.safetensors")[0]
        torch.testing.assert_close(student(tokens), theirs(tokens).logits, rtol=0, atol=1e-3)


def test_a_cached_hub_id_is_found_without_the_network(snapshot: Path, teacher_folder: Path) -> None:
    model = check_weights(manifest_of("model=hf", f"model.path={HUB_ID}", *LOAD_ONLY)).model
    assert (model.name, model.path) == ("tiny-llama", str(snapshot))
    shutil.rmtree(snapshot)
    shutil.copytree(teacher_folder, snapshot)
    words = ["model=tiny_dba", "model.teacher.manifest=null", f"model.teacher.checkpoint={HUB_ID}"]
    teacher = check_weights(manifest_of(*words, "model.embedder.vocab_size=61", "train=finetune")).model.teacher
    assert teacher is not None
    assert teacher.checkpoint == str(snapshot)
    assert teacher.manifest is not None
    assert teacher.manifest.name == "tiny-llama"


def test_the_main_snapshot_comes_first_and_an_incomplete_one_does_not_count(snapshot: Path) -> None:
    newer = snapshot.parent / "def456"
    shutil.copytree(snapshot, newer)
    assert cached_folder(HUB_ID) == snapshot
    next(snapshot.glob("*.safetensors")).unlink()
    assert cached_folder(HUB_ID) == newer
    assert cached_folder(HUB_ID, needs_weights=False) == snapshot
    shutil.rmtree(newer)
    assert cached_folder(HUB_ID) is None


def test_an_uncached_hub_id_names_three_ways_on() -> None:
    with pytest.raises(CheckpointError) as caught:
        manifest_of("model=hf", f"model.path={HUB_ID}", *LOAD_ONLY)
    text = str(caught.value)
    ways = (f"hf download {HUB_ID}", "model.path=DIR, a Hugging Face folder", "model=tiny_dba train=upcycle")
    assert all(way in text for way in (*ways, "HF_HUB_OFFLINE")), text


def test_an_unreachable_hub_is_given_up_on_within_ten_seconds(tmp_path: Path) -> None:
    """The client's own waits and retries take minutes; a port that swallows connections shows ours."""
    code = (
        "import socket, sys, os\n"
        "server = socket.create_server(('127.0.0.1', 0), backlog=16)\n"
        "os.environ['HF_ENDPOINT'] = f'http://127.0.0.1:{server.getsockname()[1]}'\n"
        "os.environ['HF_HUB_OFFLINE'] = '0'\n"
        "import time\n"
        "from huggingface_hub import HfApi\n"  # loading it is no waiting
        "from caramba.launch.preflight import find_checkpoint\n"
        "began = time.monotonic()\n"
        "try:\n"
        f"    find_checkpoint({HUB_ID!r}, 'model.path')\n"
        "finally:\n"
        "    print(time.monotonic() - began)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert float(done.stdout) < 10
    assert "Choose one:" in done.stderr, done.stderr
    assert "did not answer within" in done.stderr or "out of reach" in done.stderr


def test_a_run_that_trains_nothing_loads_scores_as_transformers_and_is_found_again(
    written: Path, tmp_path: Path, cache: Path
) -> None:
    words = ["launch", "model=hf", f"model.path={written}", *LOAD_ONLY, "device=cpu"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").glob("*/*")
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["labels"]["student_weights"] == str(written)
    assert len(result["labels"]["student_weights_signature"]) == 64
    assert not list(run.rglob("*.safetensors"))
    tokens = torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    with torch.no_grad():
        ours = load_model(str(run), with_tokenizer=False).model(tokens)
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=0, atol=1e-4)
    assert find_checkpoint(str(run), "model.checkpoint") == run
    with pytest.raises(CheckpointError, match="holds another network than the manifest describes"):
        check_weights(manifest_of("model=tiny", f"model.checkpoint={run}", "train=finetune"))
