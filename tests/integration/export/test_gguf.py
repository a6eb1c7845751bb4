"""GGUF files: written for llama.cpp, read back as transformers reads them, refused by name when damaged."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caramba.cli import main
from caramba.config.model import TeacherConfig
from caramba.data import ByteTokenizer, load_tokenizer, train_bpe
from caramba.errors import CheckpointError, ConfigError
from caramba.export.tokenizer import find_template
from caramba.export.write import export_model
from caramba.infer import load_model
from tests.integration.export.samples import FIRST, GQA, MLP, REMOTE, loud, make_run, transformer
from tests.unit.hf.folders import write

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

TEXT = "the cat sat on the mat, 1234 times:\n  and a dog's ünïcode ✓"
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
SHAPES = {
    "mha": {**GQA, "n_kv_heads": 4, "mode": "standard"},
    "gqa": {**GQA, "rope_base": 500000.0},
    "mqa, wide heads": {**GQA, "n_kv_heads": 1, "head_dim": 16},
    "llama3 scaling": {**GQA, "head_dim": 16, "rope_base": 500000.0, "rope_scaling": LLAMA3},
    "qwen2 biases": {**GQA, "bias": "qkv"},
}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))


def file_of(root: Path, attention: dict[str, object], *words: str, tied: bool = True) -> Path:
    run = make_run(root, loud(transformer(attention, tied=tied)))
    assert main(["export", str(run), "--format", "gguf", "--out", str(root / "out"), *words]) == 0
    (file,) = (root / "out").glob("*.gguf")
    return file


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    file = file_of(tmp_path, SHAPES[name], tied=name != "mha")
    ours = load_model(str(file))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    tokens = torch.tensor([ours.tokenizer.encode(TEXT)])
    with torch.no_grad():
        if name != "llama3 scaling":  # transformers' reader leaves rope_freqs.weight out
            torch.testing.assert_close(ours.model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        run = load_model(str(tmp_path / "runs" / "sample" / "one-student"))
        torch.testing.assert_close(ours.model(tokens), run.model(tokens), rtol=2e-2, atol=2e-2)  # f16 weights


@pytest.mark.parametrize(("weights", "bound"), [("f16", 1e-3), ("q8_0", 2e-2), ("q4_0", 0.3)])
def test_weights_are_stored_in_the_type_asked_for(tmp_path: Path, weights: str, bound: float) -> None:
    file = file_of(tmp_path, GQA, "--weights", weights)
    assert file.name.endswith(f"-{weights}.gguf")
    reader = gguf.GGUFReader(file)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.attn_q.weight"] == weights.upper()
    assert types["blk.1.ffn_down.weight"] == ("F16" if MLP["d_ff"] % 32 else weights.upper())
    assert types["token_embd.weight"] == ("Q8_0" if weights == "q4_0" else weights.upper())
    run = load_model(str(tmp_path / "runs" / "sample" / "one-student")).model
    back = load_model(str(file)).model
    for key, tensor in run.named_parameters():
        error = (back.state_dict()[key] - tensor).norm() / tensor.norm()
        assert error < bound, key


def test_tokenizer_and_chat_template_come_back(tmp_path: Path) -> None:
    bpe = train_bpe(["the cat sat on the mat. a dog's 1234 ünïcode ✓\n" * 30], 257)
    run = make_run(tmp_path, loud(transformer(GQA)), tokenizer=bpe)
    folder, again = tmp_path / "folder", tmp_path / "again"
    assert main(["export", str(run), "--out", str(folder)]) == 0
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert main(["export", str(folder), "--format", "gguf", "--out", str(again)]) == 0
    (file,) = again.glob("*.gguf")
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.chat_template"].contents().startswith("{% for m in messages")
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    back = load_model(str(file)).tokenizer
    assert back is not None
    assert back.encode(TEXT) == bpe.encode(TEXT)
    assert (back.eos_id, back.adds_bos) == (bpe.eos_id, False)
    assert load_tokenizer(load_model(str(file)).path).decode(bpe.encode(TEXT)) == TEXT


def test_a_run_has_the_chat_template_of_its_teacher(tmp_path: Path) -> None:
    bpe = train_bpe(["the cat sat on the mat\n" * 30], 257)
    run = make_run(tmp_path, loud(transformer(GQA)), tokenizer=bpe)
    teacher = tmp_path / "teacher"
    assert main(["export", str(run), "--out", str(teacher)]) == 0
    opened = load_model(str(run))
    assert opened.manifest is not None
    model = opened.manifest.model.model_copy(update={"teacher": TeacherConfig(checkpoint=str(teacher))})
    opened = dataclasses.replace(opened, manifest=opened.manifest.model_copy(update={"model": model}))
    assert find_template(opened) is None
    (teacher / "chat_template.jinja").write_text("{{ messages }}")
    assert find_template(opened) == "{{ messages }}"
    assert find_template(dataclasses.replace(opened, tokenizer=ByteTokenizer())) is None
    export_model(opened, tmp_path / "again", format="hf", role="student")
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_file_is_a_teacher_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path, GQA)
    capsys.readouterr()
    assert main(["generate", str(file), "--prompt", "the cat", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out
    words = ["compile", "model=hf_dba", f"model.teacher.checkpoint={file}", "train=blockwise", "data=tokens"]
    assert main([*words, f"data.path={tmp_path / 'tokens'}", "verify=none", "benchmark=none"]) == 0
    assert "latent" in capsys.readouterr().out


def test_a_model_that_no_engine_has_is_refused_by_its_key(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path, loud(REMOTE["latent"]))
    words = ["export", str(run), "--out", str(tmp_path / "out"), "--format", "gguf"]
    assert main(words) == 2
    assert "model.surgery.target: mla" in capsys.readouterr().err
    first = make_run(tmp_path / "first", loud(transformer(FIRST)))
    assert main(["export", str(first), *words[2:]]) == 2
    assert "exact_first_tokens=3 (set exact_first_tokens: 0)" in capsys.readouterr().err
    assert main([*words, "--weights", "q8"]) == 2
    assert "did you mean 'q8_0'" in capsys.readouterr().err
    assert main([*words, "--dtype", "bf16"]) == 2
    assert "--weights" in capsys.readouterr().err
    assert main([*words[:-1], "hf", "--weights", "f16"]) == 2
    assert "--format gguf" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", [2, 12, 60, 5000, -7])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    file = file_of(tmp_path, GQA)
    data = file.read_bytes()
    file.write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match=r"\.gguf: (truncated|not a GGUF file).*download it again"):
        load_model(str(file))


def test_newer_and_foreign_files_are_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path, GQA)
    data = file.read_bytes()
    file.write_bytes(data[:4] + struct.pack("<I", 4) + data[8:])
    with pytest.raises(CheckpointError, match="of GGUF version 4, expected version 2 or 3"):
        load_model(str(file))
    file.write_bytes(data[:4] + struct.pack(">I", 3) + data[8:])
    with pytest.raises(CheckpointError, match="big-endian"):
        load_model(str(file))
    file.write_bytes(
        data.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba", 1)
    )
    with pytest.raises(CheckpointError, match=r"general\.architecture='mamba' is not read; expected llama"):
        load_model(str(file))


def test_a_tokenizer_that_gguf_cannot_name_is_refused(tmp_path: Path) -> None:
    from caramba.data.gguf_tokenizer import tokenizer_metadata

    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    split = {"type": "Split", "pattern": {"Regex": "\\w+"}, "behavior": "Isolated"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    for definition in (
        {"model": model, "pre_tokenizer": {"type": "Metaspace"}},
        {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}},
        {"model": model, "pre_tokenizer": {"type": "ByteLevel"}, "normalizer": {"type": "Lowercase"}},
    ):
        with pytest.raises(ConfigError, match="GGUF has no name for how its tokenizer splits text"):
            tokenizer_metadata(definition, 3, 1, "export")
    partly: dict[str, Any] = {
        "pre_tokenizer": {"type": "ByteLevel"},
        "model": {**model, "byte_fallback": True},
    }
    partly["model"]["vocab"] = {"a": 0, "b": 1, "<0x0A>": 2}
    with pytest.raises(ConfigError, match="got BPE with byte_fallback"):
        tokenizer_metadata(partly, 3, 1, "export")
    for kind in ({"type": "Unigram"}, {**model, "byte_fallback": True}):
        with pytest.raises(ConfigError, match="GGUF cannot hold its tokenizer"):
            tokenizer_metadata({"model": kind}, 3, 1, "export")


def test_a_fallback_that_never_applies_is_accepted() -> None:
    """As transformers writes the tokenizer of a GGUF file: no token of a byte, and a sequence of no normalizers."""
    from caramba.data.gguf_tokenizer import tokenizer_metadata

    definition = json.loads(train_bpe(["the cat sat on the mat\n" * 30], 280).definition)
    plain = tokenizer_metadata(definition, 280, 256, "export")
    definition["model"]["byte_fallback"] = True
    definition["normalizer"] = {"type": "Sequence", "normalizers": []}
    assert tokenizer_metadata(definition, 280, 256, "export") == plain


@pytest.mark.parametrize("name", ["qwen3"])
def test_a_qwen3_file_is_read(tmp_path: Path, name: str) -> None:
    """Written by hand: surgery reads no norm of queries and keys, so no run exports one."""
    folder = tmp_path / "qwen3"
    theirs = write(folder, name)
    config = theirs.config
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for key, tensor in theirs.state_dict().items():
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = load_model(str(tmp_path / "q.gguf"), with_tokenizer=False).model
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_llama_cpp_computes_the_same_text(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not built here: pip install llama-cpp-python")
    file_of(tmp_path, SHAPES[name], "--check", tied=name != "mha")
    assert "check in llama.cpp: logits differ by at most 0.0" in capsys.readouterr().out
