"""`caramba compile` and `caramba launch` refuse the same manifests, before torch is loaded and anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from caramba.cli import main
from caramba.data import train_bpe, write_token_folder
from caramba.launch.freeze import freeze
from caramba.runs import mint

TINY = ("model=tiny", "train=pretrain", "benchmark=none", "device=cpu", "resume=never")
DATA = ("data=tokens", "data.path=corpus")


@pytest.fixture
def corpus(empty_folder: Path) -> Path:
    """A token folder of 300 entries in the current folder."""
    texts = [f"the {number} quick brown foxes jump over {number * 7} lazy dogs\n" * 6 for number in range(60)]
    write_token_folder(empty_folder / "corpus", {"train": texts[:50], "val": texts[50:]}, train_bpe(texts, 300), {})
    (empty_folder / "short.tokens").write_text("1 2 3 4 " * 20)
    (empty_folder / "bad.tokens").write_text("1 2 x 4")
    (empty_folder / "large.tokens").write_text("1 2 9000 " * 400)
    (empty_folder / "notes.txt").write_text("1 2 3")
    return empty_folder


REFUSED = [
    (["model.embedder.vocab_size=200", *DATA], "tokens were made with bpe-300 of 300 entries"),
    (["data=tokens", "data.path=nowhere"], "there is no such token file or folder"),
    (["data=tokens", "data.path=bad.tokens"], "token 2 at byte 4 is 'x'"),
    (["data=tokens", "data.path=large.tokens"], "largest train token id is 9000"),
    (["data=tokens", "data.path=notes.txt"], "cannot tell what tokens these are"),
    (["data=tokens", "data.path=short.tokens"], "one window needs 129"),
    ([*DATA, "train.block_size=100000"], "one window needs 100001"),
    ([*DATA, "data.val_path=nowhere.npy"], "there is no such token file or folder"),
    ([*DATA, "data.tokenizer_hash=ab"], "made with tokenizer"),
    (["model.embedder.vocab_size=512", "data=stdlib"], "model.embedder.vocab_size=512 does not fit"),
    ([*DATA, "model.checkpoint=nowhere"], "model.checkpoint=nowhere: no run there"),
    ([*DATA, "model.checkpoint=nowhere.safetensors"], "no such file"),
    (["model=tiny_dba", "train=blockwise", *DATA], "needs the teacher's weights"),
    ([*DATA, "plan=nowhere.json"], "plan=nowhere.json: no such file"),
    ([*DATA, "launcher=process", "parallel=ddp"], "launcher=process: it starts one process"),
    (["train=finetune", *DATA], "starts from weights, and the model has none"),
    ([*DATA, "train.tf32=true"], "train.tf32=true: the device cpu supports"),
    ([*DATA, "train.float8=rowwise"], "train.float8=rowwise: the device cpu supports"),
    ([*DATA, "train.optimizer_offload=true"], "on the device cpu all is in the host's memory"),
    ([*DATA, "plan=off", "train.batch_size=auto"], "batch_size=auto is found by measurement"),
    (
        [
            *DATA,
            "model=tiny_dba",
            "train=upcycle",
            "train.phases.blockwise.schedule=sequential",
            "train.steps=1",
        ],
        "schedule=sequential trains 4 blocks in turn, got steps=1",
    ),
    (
        [*DATA, "benchmark=quick", "benchmark.benchmarks.0.config.dataset=nowhere"],
        "there is no such token file or folder",
    ),
]


@pytest.mark.parametrize(("words", "text"), REFUSED, ids=[" ".join(words)[-60:] for words, _ in REFUSED])
def test_compile_and_launch_refuse_alike_and_write_nothing(corpus, capsys, words, text):
    """Trap: compile accepted vocab_size=500 on 1,024-entry tokens and a path that does not exist."""
    errors = []
    for command in ("compile", "launch"):
        assert main([command, *TINY, *words]) == 2
        shown = capsys.readouterr()
        errors.append(shown.err)
        assert "Plan of" not in shown.out
    assert errors[0] == errors[1]
    assert text in errors[0]
    assert not (corpus / "runs").exists()


@pytest.mark.parametrize("words", [DATA, ("data=tokens", "data.path=large.tokens", "model.embedder.vocab_size=9001")])
def test_compile_of_data_that_fits_prints_the_plan(corpus, capsys, words):
    assert main(["compile", *TINY, *words, "train.block_size=16"]) == 0
    assert "Plan of" in capsys.readouterr().out


def test_compile_prices_no_stage_that_a_launch_would_not_repeat(corpus, capsys):
    words = ["model=tiny_dba", "train=upcycle", "benchmark=none", "device=cpu", *DATA, "train.block_size=16"]
    manifest = freeze(words).manifest
    assert main(["compile", *words, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["stages"]
    assert all(stage["total_flops"] > 0 for stage in before)
    run = mint(manifest, words, corpus / "runs")
    (run / "plan.json").write_text("{}")
    (run / "stages").mkdir()
    for number, name in enumerate(("pretrain", "transplant", "blockwise")):
        (run / "stages" / f"{number:02d}-{name}.json").write_text("{}")
    for resume in ("auto", str(run)):
        assert main(["compile", *words, f"resume={resume}", "--json"]) == 0
        stages = json.loads(capsys.readouterr().out)["stages"]
        assert [(stage["id"], stage["steps"], stage["total_flops"]) for stage in stages[:2]] == [
            ("pretrain", 0, 0.0),
            ("blockwise", 0, 0.0),
        ]
        assert stages[0]["note"].startswith("finished in runs/tiny_dba_upcycle/")
        assert stages[2:] == before[2:]
    assert main(["compile", *words, "resume=never", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == before
    assert main(["compile", *words, f"resume={run}", "seed=3"]) == 2, "launch refuses another manifest too"
    assert "seed: 1337 -> 3" in capsys.readouterr().err


def test_compile_of_a_hub_id_downloads_nothing_and_notes_it(corpus, capsys):
    assert main(["compile", "model=llama32_dba", "train=blockwise", "benchmark=none"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes[0] == "note: a launch downloads meta-llama/Llama-3.2-1B from the hub"
    assert notes[1].startswith("note: a launch needs data for this model: ")
