"""A manifest.json that is edited while its run is interrupted: what is on record came of the former one."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caramba.data.checkpoint import load_tensors
from tests.integration.commands import SMALL, caramba, interrupt_when, only_run

WORDS = [
    *("launch", "model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu", *SMALL),
    *("train.batch_size=2", "train.block_size=32", "train.steps=24", "train.save_every=2"),
    *("settings.instrument=none", "train.compile=false"),
]


@pytest.fixture(name="killed", scope="module")
def _killed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    interrupt_when("runs/*/*/checkpoints/pretrain.state.pt", WORDS, folder, cache, signal.SIGKILL)
    return only_run(folder)


@pytest.fixture(name="run")
def _run(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "runs" / killed.parent.name / killed.name))


def edit(run: Path, change: Callable[[Any], None], indent: int = 2) -> None:
    plain = json.loads((run / "manifest.json").read_text())
    change(plain)
    (run / "manifest.json").write_text(json.dumps(plain, indent=indent))


def faster(plain: Any) -> None:
    plain["groups"][0]["runs"][0]["train"]["lr"] = 0.5


def elsewhere(plain: Any) -> None:
    plain["launcher"]["type"] = "process"
    plain["notes"] = "moved"


def files(run: Path) -> dict[str, bytes]:
    names = [file for file in run.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file): file.read_bytes() for file in names}


@pytest.mark.parametrize("is_noted", [True, False])
def test_an_edited_manifest_is_refused_and_put_back_it_goes_on(
    run: Path, is_noted: bool, tmp_path: Path, cache: Path
) -> None:
    sources = json.loads((run / "sources.json").read_text())
    if not is_noted:  # as runs were before
        del sources["manifest"]
        (run / "sources.json").write_text(json.dumps(sources))
    former = (run / "manifest.json").read_bytes()
    edit(run, faster)
    before = files(run)
    refused = caramba(["resume", str(run)], tmp_path, cache)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert f"{run}/manifest.json: the manifest has changed since this run began" in refused.stderr
    what = "groups[0].runs[0].train.lr differs" if is_noted else f"was made with {run.name[-8:]}"
    assert what in refused.stderr
    assert f"caramba rerun {run}" in refused.stderr
    assert files(run) == before
    (run / "manifest.json").write_bytes(former)
    done = caramba(["resume", str(run)], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "manifest" in json.loads((run / "sources.json").read_text())


def test_what_a_run_computes_is_held_and_how_it_is_started_is_not(run: Path, tmp_path: Path, cache: Path) -> None:
    """A folder under another name, a file that an editor laid out anew, and another launcher are legitimate."""
    moved = run.rename(run.parent / "mine")
    edit(moved, elsewhere, indent=4)
    done = caramba(["resume", str(moved)], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    edit(moved, faster)
    refused = caramba(["resume", str(moved)], tmp_path, cache)
    assert refused.returncode == 2, "a finished run too: its tables name what it was made with"
    again = caramba(["rerun", str(moved)], tmp_path, cache)
    assert again.returncode == 0, again.stdout + again.stderr


def test_a_file_laid_out_anew_is_known_by_the_name_of_its_folder(run: Path, tmp_path: Path, cache: Path) -> None:
    (run / "sources.json").unlink()
    edit(run, lambda plain: None, indent=4)
    done = caramba(["resume", str(run)], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr


def test_data_that_moved_is_found_by_an_edited_path(tmp_path: Path, cache: Path) -> None:
    """Its content is held by itself."""
    (tmp_path / "text.txt").write_text("def area(r):\n    return 3 * r * r\n" * 2000)
    made = caramba(["prepare", "text", "text.txt", "--output", "tokens", "--tokenizer", "byte"], tmp_path, cache)
    assert made.returncode == 0, made.stderr
    words = [word for word in WORDS if not word.startswith("data.")]
    words += ["data=tokens", f"data.path={tmp_path / 'tokens'}", "model.embedder.vocab_size=512"]
    interrupt_when("runs/*/*/checkpoints/pretrain.state.pt", words, tmp_path, cache, signal.SIGKILL)
    run = only_run(tmp_path)
    (tmp_path / "tokens").rename(tmp_path / "kept")

    def follow(plain: Any) -> None:
        plain["groups"][0]["data"]["path"] = str(tmp_path / "kept")

    edit(run, follow)
    done = caramba(["resume", str(run)], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert load_tensors(run / "checkpoints" / "pretrain.safetensors")
