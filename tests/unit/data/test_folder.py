from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from caramba.data import ByteTokenizer, build_token_dataset, open_token_folder, train_bpe, write_token_folder
from caramba.errors import DataError

SPLITS = {"train": ["hello world\n" * 30, "ünïcode ✓"], "val": ["held out\n"]}


def make(folder: Path) -> Path:
    write_token_folder(folder, SPLITS, train_bpe(SPLITS["train"], 280), {"corpus": "test"})
    return folder


def change_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changes))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    opened = open_token_folder(make(tmp_path / "x"))
    assert opened.train.dtype == np.uint16
    assert opened.tokenizer.decode(opened.train) == "".join(SPLITS["train"])
    assert opened.val is not None
    assert opened.tokenizer.decode(opened.val) == "held out\n"
    assert (opened.train == opened.tokenizer.eos_id).sum() == 2
    assert (opened.token_bytes == opened.tokenizer.token_bytes).all()
    facts = opened.meta["splits"]["train"]
    assert facts["tokens"] == opened.train.size
    assert facts["bytes"] == sum(len(text.encode()) for text in SPLITS["train"])
    assert facts["max_id"] == opened.train.max()
    assert opened.meta["tokenizer"]["hash"] == opened.tokenizer.hash
    assert len(build_token_dataset(path=tmp_path / "x", block_size=4)) == (opened.train.size - 1) // 4


def test_equal_content_has_an_equal_fingerprint(tmp_path: Path) -> None:
    first, second = open_token_folder(make(tmp_path / "x")), open_token_folder(make(tmp_path / "y"))
    assert first.fingerprint == second.fingerprint
    write_token_folder(tmp_path / "z", SPLITS | {"val": ["held in\n"]}, first.tokenizer, {"corpus": "test"})
    assert open_token_folder(tmp_path / "z").fingerprint != first.fingerprint


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def texts() -> Iterator[str]:
        yield "a" * 3_000_000
        raise error

    with pytest.raises(error):
        write_token_folder(tmp_path / "x", SPLITS | {"val": texts()}, ByteTokenizer(), {})
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_the_first_to_finish_stays(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        make(tmp_path / "x")
        yield "late"

    write_token_folder(tmp_path / "x", SPLITS | {"val": texts()}, ByteTokenizer(), {})
    assert open_token_folder(tmp_path / "x").tokenizer.name.startswith("bpe-")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_foreign_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine.txt").write_text("keep")
    with pytest.raises(OSError, match="x"):
        make(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "mine.txt").read_text() == "keep"


def test_processes_that_build_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import sys; from caramba.config.data import DataConfig; from caramba.data import open_corpus;"
        "print(open_corpus(DataConfig(type='stdlib', tokenizer='byte', max_bytes=3_000_000)).fingerprint)"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {run.communicate(timeout=300)[0] for run in runs}
    assert all(run.returncode == 0 for run in runs)
    assert len(said) == 1
    assert len(list((tmp_path / "home" / "data").iterdir())) == 1


def test_damaged_folders(tmp_path: Path, forget_sums: Callable[[Path], Path]) -> None:
    good = forget_sums(make(tmp_path / "good"))

    def copy(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    folder = copy("no_meta")
    (folder / "meta.json").unlink()
    with pytest.raises(DataError, match=r"no meta\.json in this folder"):
        open_token_folder(folder)

    folder = copy("cut")
    size = (folder / "train-00000.npy").stat().st_size
    with open(folder / "train-00000.npy", "rb+") as file:
        file.truncate(size - 10)
    with pytest.raises(DataError, match=rf"truncated.*\({size} bytes\), found {size - 10} bytes"):
        open_token_folder(folder)

    folder = copy("other_tokens")
    np.save(folder / "val-00000.npy", np.zeros(3, np.uint16))
    with pytest.raises(DataError, match=r"val-00000\.npy: 3 tokens of uint16, but meta\.json has"):
        open_token_folder(folder)

    folder = copy("other_tokenizer")
    train_bpe(["another text"], 270).save(folder / "tokenizer.json")
    with pytest.raises(DataError, match=r"the tokenizer was replaced"):
        open_token_folder(folder)

    folder = copy("no_tokenizer")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: missing"):
        open_token_folder(folder)

    folder = copy("schema")
    change_meta(folder, schema=99)
    with pytest.raises(DataError, match="schema 99, expected 2"):
        open_token_folder(folder)

    folder = copy("half_meta")
    change_meta(folder, tokenizer={})
    with pytest.raises(DataError, match="KeyError"):
        open_token_folder(folder)


def test_a_split_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the val split has no documents"):
        write_token_folder(tmp_path / "x", {"train": ["a"], "val": []}, ByteTokenizer(), {})
    assert list(tmp_path.iterdir()) == []
