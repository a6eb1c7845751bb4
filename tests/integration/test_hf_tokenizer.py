"""The tokenizer of a Hugging Face folder: it goes with the weights, whatever text a run opens beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers

from caramba.cli import main
from caramba.data import ByteTokenizer, train_bpe
from caramba.data.folder import write_token_folder
from caramba.export.tokenizer import write_tokenizer
from caramba.infer.model_bundle import load_model
from tests.integration.commands import caramba, only_run
from tests.unit.hf.folders import BASE

VOCAB, CONTEXT = 300, 96
TEXT = ["one two three four five six seven eight nine ten eleven twelve " * 20] * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with a tokenizer of 257 entries and room for more, as transformers writes it."""
    config = transformers.LlamaConfig(**(BASE | {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}))
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    write_tokenizer(tmp_path / "llama", ByteTokenizer(), max_positions=CONTEXT)
    (tmp_path / "llama" / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path / "llama"


def prepared(folder: Path, bpe: bool) -> str:
    tokenizer = train_bpe(iter(TEXT), 270) if bpe else ByteTokenizer()
    write_token_folder(folder, {"train": TEXT, "val": TEXT[:1]}, tokenizer, {})
    return str(folder)


def test_a_run_that_read_no_text_opens_with_the_folder_s_tokenizer(folder: Path, tmp_path: Path, cache: Path) -> None:
    # data is left at stdlib, whose 2048 entries are neither the model's nor within its vocabulary
    words = ["launch", "model=hf", f"model.path={folder}", "train=none", "benchmark=none"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stderr
    opened = load_model(str(only_run(tmp_path)))
    assert opened.tokenizer is not None
    assert opened.tokenizer.vocab_size == 257
    assert opened.tokenizer.encode("Ab") == [65, 98]
    assert opened.max_positions == CONTEXT
    # without a tokenizer in the folder there is none, rather than that of a text which was never read
    other = tmp_path / "other"
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    other.mkdir()
    words[2] = f"model.path={tmp_path / 'bare'}"
    assert caramba(words, other, cache).returncode == 0
    assert load_model(str(only_run(other))).tokenizer is None


def test_the_standard_library_is_read_with_the_folder_s_tokenizer(folder: Path, tmp_path: Path, cache: Path) -> None:
    words = ["launch", "model=hf", f"model.path={folder}", "train=finetune", "benchmark=none"]
    words += [
        "data.max_bytes=200000",
        *(f"train.phases.global.{item}" for item in ("steps=1", "warmup_steps=0", "batch_size=1", "block_size=16")),
    ]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((only_run(tmp_path) / "manifest.json").read_text())
    (group,) = manifest["groups"]
    assert (group["data"]["tokenizer"], group["data"]["tokenizer_path"]) == ("model", str(folder))
    assert f"tokenizer of {folder}: 257 entries" in done.stdout + done.stderr
    # asked for by name it needs a folder; a size that is typed asks for a tokenizer of that size
    refused = caramba(["launch", "model=tiny", "train=pretrain", "data.tokenizer=model"], tmp_path, cache)
    assert refused.returncode == 2
    assert "data.tokenizer=model: neither model.path, model.checkpoint nor" in refused.stderr
    refused = caramba([*words, "data.vocab_size=512"], tmp_path, cache)
    assert refused.returncode == 2
    assert f"model.embedder.vocab_size={VOCAB} does not fit the data" in refused.stderr


def test_text_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path, cache: Path) -> None:
    words = ["launch", "model=hf", f"model.path={folder}", "train=finetune", "benchmark=none", "data=tokens"]
    words += [f"train.phases.global.{item}" for item in ("steps=1", "warmup_steps=0", "batch_size=1", "block_size=16")]
    done = caramba([*words, f"data.path={prepared(tmp_path / 'bpe', bpe=True)}"], tmp_path, cache)
    assert done.returncode == 2
    assert "has a tokenizer of 257 entries, and the tokens of" in done.stderr
    assert "the same ids mean other text; prepare the data with the model's (caramba prepare text" in done.stderr
    # the same tokenizer passes, though its files are spelt differently
    done = caramba([*words, f"data.path={prepared(tmp_path / 'bytes', bpe=False)}"], tmp_path, cache)
    assert done.returncode == 0, done.stderr


def test_an_export_keeps_the_chat_template_and_the_context(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"
    for format in ("safetensors", "ckpt", "dcp"):
        own, back = tmp_path / format, tmp_path / f"{format}-hf"
        assert main(["export", str(folder), "--format", format, "--out", str(own)]) == 0
        assert main(["export", str(own), "--format", "hf", "--out", str(back)]) == 0
        assert json.loads((back / "config.json").read_text())["max_position_embeddings"] == CONTEXT
