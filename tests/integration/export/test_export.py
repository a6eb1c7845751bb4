"""`caramba export`: what comes back from folders and own formats, and mistakes that leave nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from caramba.cli import main
from caramba.data.checkpoint import load_tensors
from caramba.data.checkpoint.formats import read_model_tensors
from caramba.errors import ConfigError
from caramba.export.write import check_out
from caramba.infer import load_model
from caramba.model import load_pretrained
from tests.integration.export.samples import GQA, REMOTE, exported, loud, make_run, tokens, transformer

pytest.importorskip("transformers")


def test_a_folder_that_was_exported_is_opened_with_its_tokenizer(tmp_path):
    model = loud(REMOTE["every topology"])
    folder = exported(tmp_path, make_run(tmp_path, model, block_size=48))
    opened = load_model(str(folder))
    assert opened.model.spec == model.spec
    assert opened.labels == {"proxy": "untrained"}
    assert opened.max_positions == 48
    assert opened.tokenizer.encode("the cat") == list(b"the cat")
    with torch.no_grad():
        torch.testing.assert_close(opened.model(tokens()), model(tokens()))
    again = tmp_path / "again"
    assert main(["export", str(folder), "--out", str(again)]) == 0
    assert load_tensors(again / "model.safetensors").keys() == load_tensors(folder / "model.safetensors").keys()
    assert main(["export", str(folder), "--format", "safetensors", "--out", str(tmp_path / "own")]) == 0
    bare = load_model(str(tmp_path / "own"), tokenizer="byte")
    assert bare.tokenizer.vocab_size == 257


def test_a_run_s_checkpoint_file_is_opened_with_the_run_s_tokenizer(tmp_path):
    run = make_run(tmp_path, loud(transformer(GQA)), block_size=48)
    opened = load_model(str(run / "checkpoints" / "pretrain.safetensors"))
    assert (opened.run_dir, opened.max_positions) == (run, 48)
    assert opened.tokenizer is not None
    assert opened.tokenizer.encode("cat") == [99, 97, 116]
    # elsewhere the same file says nothing of its text
    alone = tmp_path / "alone" / "checkpoints" / "pretrain.safetensors"
    alone.parent.mkdir(parents=True)
    shutil.copyfile(run / "checkpoints" / "pretrain.safetensors", alone)
    assert load_model(str(alone)).tokenizer is None


@pytest.mark.parametrize("name", ["model.safetensors", "model.ckpt", ""])
def test_own_formats_take_a_dtype_and_refuse_what_it_cannot_hold(tmp_path, capsys, name):
    model = loud(REMOTE["dba"])
    run = make_run(tmp_path, model)
    format = {"model.safetensors": "safetensors", "model.ckpt": "ckpt", "": "dcp"}[name]
    folder = exported(tmp_path, run, "--format", format, "--dtype", "bf16")
    found = read_model_tensors(folder / name)
    assert {found[key].dtype for key, _ in model.named_parameters()} == {torch.bfloat16}
    back, _ = load_pretrained(folder / name)
    for key, tensor in model.named_parameters():
        assert torch.equal(back.state_dict()[key], tensor.bfloat16().float()), key
    for key, tensor in model.named_buffers():  # RoPE's frequencies are not rounded
        assert torch.equal(back.state_dict()[key], tensor), key
    with torch.no_grad():
        model.embedder.token.weight[3, 2] = 1e6
    run = make_run(tmp_path, model)
    words = ["export", str(run), "--format", format, "--dtype", "fp16", "--out", str(tmp_path / "x")]
    assert main(words) == 2
    assert "embedder.token.weight holds 1e+06, and the largest number of float16" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("format", "name"), [("safetensors", "model.safetensors"), ("ckpt", "model.ckpt"), ("dcp", "")]
)
def test_own_formats_come_back_bit_for_bit(tmp_path, format, name):
    model = loud(REMOTE["gates"])
    run = make_run(tmp_path, model)
    folder = exported(tmp_path, run, "--format", format)
    back, labels = load_pretrained(folder / name)
    assert labels == {"proxy": "untrained"}
    assert back.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    again = tmp_path / "again"
    if name:
        assert main(["export", str(folder / name), "--format", "safetensors", "--out", str(again)]) == 0


@pytest.fixture(scope="module")
def measured_run(tmp_path_factory):
    import caramba

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("measured"))
        run = caramba.launch(
            [
                *(
                    "model=tiny",
                    "train=pretrain",
                    "train.steps=2",
                    "train.batch_size=2",
                    "train.block_size=32",
                ),
                *(
                    "benchmark=smoke",
                    "verify=none",
                    "device=cpu",
                    "settings.instrument=none",
                    "notes='a | b'",
                ),
                *("data.max_bytes=400000", "data.vocab_size=512", "model.embedder.vocab_size=512"),
            ],
            quiet=True,
        )
        return type(run)(run.path.resolve())


@pytest.mark.parametrize("format", ["hf", "safetensors", "ckpt"])
def test_an_export_of_a_run_has_a_model_card(tmp_path, measured_run, format):
    run = measured_run
    folder = exported(tmp_path, run.path, "--format", format)
    card = (folder / "README.md").read_text()
    library = {"hf": "transformers"}.get(format, "caramba")
    assert card.startswith(f"---\nlibrary_name: {library}\ntags: [caramba, student]\n")
    facts = ("Date", "Duration", "Command", "Model", "Data", "Device", "Git")
    assert [line for line in facts if f"| {line} |" in card] == list(facts)
    assert "caramba launch model=tiny train=pretrain train.steps=2" in card
    assert f"| `perplexity.student.perplexity` | {run.metrics['perplexity.student.perplexity']:.6g} |" in card
    again = exported(tmp_path / "again", folder, "--format", "safetensors")
    assert "## Training" not in (again / "README.md").read_text()


def test_a_ckpt_loads_into_a_lightning_module(tmp_path):
    import lightning.pytorch as pl

    from caramba.model import build_model

    class Mine(pl.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

    model = loud(REMOTE["gates"])
    folder = exported(tmp_path, make_run(tmp_path, model), "--format", "ckpt")
    fresh = build_model(model.spec, seed=9)
    loaded = Mine.load_from_checkpoint(folder / "model.ckpt", model=fresh, strict=True, weights_only=True)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], tensor), key
    n_bytes = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    assert (folder / "model.ckpt").stat().st_size < 1.5 * n_bytes + 100_000  # each tensor is stored once


def test_a_folder_index_that_could_run_code_is_refused(tmp_path, capsys):
    import pickle

    from caramba.errors import CheckpointError

    folder = exported(tmp_path, make_run(tmp_path, loud(REMOTE["dba"])), "--format", "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match="could run code"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--format", "hff", "--out", "x"], "did you mean 'hf'"),
        (["--format", "hf"], "--out"),
        (["--out", "full"], "not empty"),
        (["--out", "x", "--dtype", "b16"], "did you mean 'bf16'"),
        (["--out", "x", "--which", "nobody"], "invalid choice"),
        (["--out", "x", "--which", "teacher"], "has no teacher"),
        (["--out", "x", "--colour"], "unrecognized arguments"),
    ],
)
def test_mistakes_exit_2_and_write_nothing(tmp_path, monkeypatch, capsys, words, text):
    run = make_run(tmp_path, loud(REMOTE["dba"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    assert main(["export", str(run), *words]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_an_unknown_run_is_named_and_force_replaces(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path, loud(REMOTE["dba"]))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "smaple", "--out", "x"]) == 2
    assert "sample" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    folder = exported(tmp_path, run, "--force")
    assert (folder / "mine.txt").read_text() == "mine"
    assert (folder / "config.json").is_file()


def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written \(.*\); name a folder where you may write"):
        check_out(tmp_path / "file" / "out", force=False)
    check_out(tmp_path / "new" / "out", force=False)
    assert list((tmp_path / "new").iterdir()) == []
