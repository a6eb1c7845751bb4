"""Students of multi-head latent attention in stock engines: transformers' DeepSeek V3, and GGUF of deepseek2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from caramba.cli import main
from caramba.data.checkpoint import load_tensors, read_metadata, save_tensors
from caramba.errors import CheckpointError
from caramba.export.check import check_folder
from caramba.export.deepseek import deepseek_tensors, mla_blocks, vllm_note
from caramba.export.write import export_model
from caramba.infer import load_model
from tests.integration.export.samples import (
    DBA,
    FIRST,
    LATENT,
    NORM,
    block,
    loud,
    make_run,
    spec,
    tokens,
    transformer,
)

transformers = pytest.importorskip("transformers")
MLA = {**LATENT, "mla": True, "head_dim": 10, "rope_base": 300.0}
SHAPES = {
    "narrow latent": MLA,
    "wide latent": {**MLA, "sem_dim": 24, "geo_dim": 8},
    "wide key": {**MLA, "head_dim": 4, "geo_dim": 12},
    "one pair": {**MLA, "geo_dim": 2, "latent_norm_eps": 1.0},
    "untied": {**MLA, "n_heads": 2},
}


def run_of(root: Path, name: str) -> Path:
    return make_run(root, loud(transformer(SHAPES[name], tied=name != "untied")))


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_computes_the_same_logits_without_remote_code(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path, name)
    folder = tmp_path / "out"
    assert main(["export", str(run), "--format", "deepseek", "--out", str(folder)]) == 0
    assert not list(folder.glob("*.py"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    ours = load_model(str(run)).model
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens()).logits, ours(tokens()), rtol=1e-4, atol=1e-4)
        start = tokens()[:, :4]
        found = theirs.generate(start, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        text = start
        for _ in range(12):
            text = torch.cat((text, ours(text)[:, -1:].argmax(-1)), 1)
    assert torch.equal(found, text)


def test_check_reports_what_the_engine_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, "wide latent")
    words = ["export", str(run), "--check", "--out", str(tmp_path / "out"), "--format"]
    assert main([*words, "deepseek"]) == 0
    assert re.search(
        r"check in transformers: logits differ by at most \S+e-0[5-9]; 3\d greedy", capsys.readouterr().out
    )
    for more, text in ((["safetensors"], "caramba's own"), (["hf", "--dtype", "bf16"], "rounds the weights")):
        assert main([*words, *more]) == 2
        assert text in capsys.readouterr().err
    # a folder of other weights is found out
    opened = load_model(str(run))
    with torch.no_grad():
        opened.model.embedder.token.weight.mul_(-1.0)
    with pytest.raises(CheckpointError, match="expected the model's own"):
        check_folder(opened, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_llama_cpp_computes_the_same_text_from_a_cache_as_small(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not built here: pip install llama-cpp-python")
    run = run_of(tmp_path, name)
    assert main(["export", str(run), "--check", "--format", "gguf", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    found = re.search(r"check in llama.cpp: logits differ by at most ([\d.e-]+); ", said)
    assert found is not None
    assert float(found[1]) < 0.1
    assert "bytes a token and layer" in said


def test_a_folder_for_vllm_has_the_epsilon_of_the_other_norms_and_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, "wide latent")
    for engine in ("transformers", "vllm"):
        words = [
            "export",
            str(run),
            "--format",
            "deepseek",
            "--engine",
            engine,
            "--out",
            str(tmp_path / engine),
        ]
        assert main(words) == 0
    assert vllm_note(load_model(str(run)).model.spec) is not None
    fits = transformer({**MLA, "sem_dim": 256, "geo_dim": 64})
    assert vllm_note(fits) is None
    said = capsys.readouterr()
    assert "this model has 32: serve it with VLLM_MLA_DISABLE=1" in said.out + said.err
    ours, theirs = (load_tensors(tmp_path / name / "model.safetensors") for name in ("transformers", "vllm"))
    assert set(theirs) - set(ours) == {"lm_head.weight"}
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["tie_word_embeddings"] is False
    key = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    scaled = ours[key].clone()
    scaled[:24] *= (1e-5 / 1e-6) ** 0.5
    torch.testing.assert_close(theirs[key], scaled)


def test_weights_are_read_one_at_a_time(tmp_path: Path) -> None:
    run = run_of(tmp_path, "wide latent")
    opened, described = load_model(str(run)), load_model(str(run), device="meta")
    assert all(parameter.is_meta for parameter in described.model.parameters())
    assert set(described.weights) == set(opened.weights)
    for name, wanted in opened.weights.items():
        assert torch.equal(described.weights[name], wanted)
    for dtype in (None, torch.bfloat16):
        found, wanted = (
            deepseek_tensors(item.model.spec, item.weights, "transformers", dtype) for item in (described, opened)
        )
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            assert tensor.dtype == (dtype or torch.float32)
            assert torch.equal(found[name], tensor)


def test_a_damaged_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    run = run_of(tmp_path, "wide latent")
    file = load_model(str(run)).path
    tensors = load_tensors(file) | {"embedder.token.weight": torch.full((257, 32), float("nan"))}
    metadata = read_metadata(file)
    save_tensors(file, tensors, metadata)
    described = load_model(str(run), device="meta")
    with pytest.raises(CheckpointError, match=r"embedder\.token\.weight holds 8,224 values that are not finite"):
        export_model(described, tmp_path / "out", format="deepseek", role="student")
    save_tensors(file, {"embedder.token.weight": tensors["embedder.token.weight"]}, metadata)
    with pytest.raises(CheckpointError, match="missing "):
        load_model(str(run), device="meta")


def test_gguf_has_the_keys_and_shapes_of_deepseek2(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    run = run_of(tmp_path, "wide latent")
    assert main(["export", str(run), "--format", "gguf", "--weights", "q8_0", "--out", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").glob("*.gguf")
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "deepseek2"
    assert (fields["deepseek2.attention.key_length"], fields["deepseek2.attention.value_length"]) == (32, 24)
    assert (fields["deepseek2.attention.key_length_mla"], fields["deepseek2.attention.value_length_mla"]) == (
        18,
        10,
    )
    found = {tensor.name: (tuple(tensor.shape), tensor.tensor_type.name) for tensor in reader.tensors}
    assert found["blk.1.attn_kv_a_mqa.weight"] == ((32, 32), "F32")
    assert found["blk.0.attn_k_b.weight"] == ((10, 24, 4), "F16")
    assert found["blk.0.attn_v_b.weight"] == ((24, 10, 4), "F16")
    assert found["blk.0.attn_q.weight"] == ((32, 72), "Q8_0")


def test_what_stands_in_the_way_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        r"has mla=false \(set mla: true\).*model.surgery.target: mla": transformer(LATENT),
        r"null_attn=true \(set null_attn: false\)": transformer({**LATENT, "null_attn": True}),
        r"exact_first_tokens=3 \(set exact_first_tokens: 0\)": transformer(FIRST),
        r"local_window=8 \(set local_window: null\)": transformer({**LATENT, "local_window": 8}),
        r"layout=per_head \(set layout: latent\)": transformer(DBA),
        "differs from the first block's": spec(*block(MLA), *block({**MLA, "sem_dim": 6})),
        "several eps": spec(*block(MLA)).model_copy(),
    }
    other = spec(*block(MLA)).model_dump(mode="json")
    other["topology"]["layers"][-1] = {**NORM, "eps": 1e-3}
    cases["several eps"] = type(cases["several eps"]).model_validate(other)
    for text, described in cases.items():
        with pytest.raises(Exception, match=text):
            mla_blocks(described, "export")
    run = make_run(tmp_path, loud(transformer(LATENT)))
    words = ["export", str(run), "--out", str(tmp_path / "out"), "--format"]
    assert main([*words, "deepseek"]) == 2
    assert "model.surgery.target: mla" in capsys.readouterr().err
    assert main([*words, "hf", "--engine", "vllm"]) == 2
    assert "--format deepseek" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
