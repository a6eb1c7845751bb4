from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from caramba.config.data import DataConfig
from caramba.data import count_bytes, open_corpus, open_windows, refuse_overlap, train_bpe, write_token_folder
from caramba.data.corpus import stdlib_root
from caramba.errors import DataError

SMALL = {"type": "stdlib", "vocab_size": 300, "val_frac": 0.2, "max_bytes": 400_000}


def config(**fields: object) -> DataConfig:
    return DataConfig.model_validate({"type": "tokens", **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = {"train": ["some text to train on\n" * 40], "val": ["and some held out\n" * 10]}
    write_token_folder(tmp_path / "made", texts, train_bpe(texts["train"], 280), {"corpus": "test"})
    return tmp_path / "made"


def test_stdlib_bpe(cache_home: Path) -> None:
    said: list[str] = []
    corpus = open_corpus(DataConfig.model_validate(SMALL), progress=said.append)
    assert any("training a byte-level BPE of 300 entries" in line for line in said)
    assert any("encoding train" in line for line in said)
    assert corpus.folder.parent == cache_home / "data"
    assert corpus.name == "stdlib"
    assert corpus.vocab_size == 300
    assert corpus.train.dtype == np.uint16
    meta = json.loads((corpus.folder / "meta.json").read_text())
    assert corpus.tokenizer is not None
    assert corpus.token_bytes is not None
    for split, tokens in (("train", corpus.train), ("val", corpus.val)):
        files = meta["source"]["files"][split]
        text = b"".join((stdlib_root() / name).read_bytes() for name in files)
        assert corpus.tokenizer.decode(tokens) == text.decode()
        assert count_bytes(tokens, corpus.token_bytes) == len(text) == meta["splits"][split]["bytes"]
        assert (tokens == corpus.tokenizer.eos_id).sum() == len(files) == meta["splits"][split]["documents"]
    corpus.check(vocab_size=300, block_size=64)


def test_a_warm_open_reads_no_corpus_and_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_corpus(DataConfig.model_validate(SMALL))

    def unexpected(*_: object) -> None:
        raise AssertionError("the corpus was read again")

    monkeypatch.setattr("caramba.data.corpus.collect_documents", unexpected)
    best = 1.0
    for _ in range(5):
        start = time.process_time()
        second = open_corpus(DataConfig.model_validate(SMALL))
        best = min(best, time.process_time() - start)
    assert best < 0.05
    assert second.fingerprint == first.fingerprint
    assert (second.train == first.train).all()


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 310},
        {"val_frac": 0.3},
        {"max_bytes": 390_000},
        {"tokenizer": "byte", "vocab_size": 257},
    ],
)
def test_each_setting_that_changes_content_has_its_own_cache(change: dict[str, object]) -> None:
    first = open_corpus(DataConfig.model_validate(SMALL))
    second = open_corpus(DataConfig.model_validate(SMALL | change))
    assert first.folder != second.folder
    assert first.fingerprint != second.fingerprint


def test_stdlib_bytes() -> None:
    corpus = open_corpus(DataConfig(type="stdlib", tokenizer="byte", name="bytes", max_bytes=200_000))
    assert (corpus.vocab_size, corpus.name) == (257, "bytes")
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.decode([100, 101, 102, 256]) == "def"
    with pytest.raises(DataError, match=r"data\.tokenizer=byte has 257 entries"):
        open_corpus(DataConfig(type="stdlib", tokenizer="byte", vocab_size=2048))


def test_opening_does_not_load_torch(cache_home: Path) -> None:
    open_corpus(DataConfig.model_validate(SMALL))
    code = (
        "import sys; from caramba.config.data import DataConfig; from caramba.data import open_corpus;"
        f"open_corpus(DataConfig.model_validate({SMALL!r}));"
        "print([name for name in ('torch', 'lightning', 'tokenizers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_bare_file_holds_out_its_end(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000))
    corpus = open_corpus(config(path=str(tmp_path / "x.npy"), val_frac=0.1))
    assert corpus.train.tolist() == list(range(900))
    assert corpus.val.tolist() == list(range(900, 1000))
    assert isinstance(corpus.val, np.memmap)
    assert (corpus.name, corpus.tokenizer, corpus.vocab_size, corpus.token_bytes) == ("x", None, None, None)
    corpus.check(vocab_size=1000, block_size=99)
    with pytest.raises(DataError, match=r"x\.npy: the val split has 100 tokens, one window needs 101"):
        corpus.check(vocab_size=1000, block_size=100)
    with pytest.raises(DataError, match=r"largest train token id is 999, the model has vocab_size=999"):
        corpus.check(vocab_size=999, block_size=10)
    with pytest.raises(DataError, match=r"largest token id is 999, data\.vocab_size=500"):
        open_corpus(config(path=str(tmp_path / "x.npy"), vocab_size=500))
    with pytest.raises(DataError, match=r"a bare \.npy file does not say what made it"):
        open_corpus(config(path=str(tmp_path / "x.npy"), tokenizer_hash="abc"))


def test_a_val_file_of_its_own(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(100))
    (tmp_path / "v.tokens").write_text("7 8 999")
    corpus = open_corpus(config(path=str(tmp_path / "x.npy"), val_path=str(tmp_path / "v.tokens")))
    assert corpus.train.size == 100
    assert corpus.val.tolist() == [7, 8, 999]
    with pytest.raises(DataError, match=r"v\.tokens: largest val token id is 999"):
        corpus.check(vocab_size=100, block_size=2)
    with pytest.raises(DataError, match="is the file that is trained on"):
        open_corpus(config(path=str(tmp_path / "x.npy"), val_path=str(tmp_path / "x.npy")))
    with pytest.raises(DataError, match=r"none\.npy: there is no such token file"):
        open_corpus(config(path=str(tmp_path / "x.npy"), val_path=str(tmp_path / "none.npy")))


def test_fingerprints_follow_content(tmp_path: Path) -> None:
    for name, ids in (("a", np.arange(100)), ("b", np.arange(100)), ("c", np.arange(100)[::-1])):
        np.save(tmp_path / f"{name}.npy", ids)
    a, b, c = (open_corpus(config(path=str(tmp_path / f"{name}.npy"))).fingerprint for name in "abc")
    assert a == b != c
    assert open_corpus(config(path=str(tmp_path / "a.npy"), val_frac=0.5)).fingerprint != a


def test_a_token_folder(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(config(path=str(folder)))
    assert corpus.tokenizer is not None
    assert corpus.name == "made"
    assert corpus.tokenizer.decode(corpus.val) == "and some held out\n" * 10
    assert open_corpus(config(path=str(folder), vocab_size=corpus.vocab_size, tokenizer_hash=corpus.tokenizer.hash))
    with pytest.raises(DataError, match=r"made with a vocabulary of \d+, data\.vocab_size=50257"):
        open_corpus(config(path=str(folder), vocab_size=50257))
    with pytest.raises(DataError, match=rf"made with tokenizer {corpus.tokenizer.hash}, data\.tokenizer_hash=0123"):
        open_corpus(config(path=str(folder), tokenizer_hash="0123"))
    with pytest.raises(DataError, match=r"made with bpe-\d+ of \d+ entries, the model has vocab_size=200"):
        corpus.check(vocab_size=200, block_size=4)
    np.save(tmp_path / "v.npy", np.arange(20))
    other = open_corpus(config(path=str(folder), val_path=str(tmp_path / "v.npy")))
    assert other.val.size == 20
    assert other.fingerprint != corpus.fingerprint


def test_a_folder_without_val_holds_out_its_end(folder: Path, forget_sums: Callable[[Path], Path]) -> None:
    forget_sums(folder)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["splits"]["val"]
    (folder / "meta.json").write_text(json.dumps(meta))
    corpus = open_corpus(config(path=str(folder), val_frac=0.25))
    whole = np.load(folder / "train-00000.npy")
    assert (np.concatenate([corpus.train, corpus.val]) == whole).all()
    assert corpus.val.size == round(whole.size * 0.25)
    assert corpus.max_ids == (whole.max(), whole.max())


@pytest.mark.parametrize("split", ["train", "val"])
def test_only_documents_kept_apart_need_the_document_index(
    folder: Path, split: str, forget_sums: Callable[[Path], Path]
) -> None:
    forget_sums(folder)
    (folder / f"{split}-documents.npy").unlink()
    corpus = open_corpus(config(path=str(folder)))
    assert corpus.index is None
    refuse_overlap(corpus, open_windows(corpus, "train", 8), [0], what="surgery")  # nothing to compare
    with pytest.raises(DataError, match=rf"{split}-documents\.npy: missing; it locates the documents"):
        open_corpus(config(path=str(folder), document_mask=True))


def test_a_damaged_document_index_is_told_when_it_is_read(folder: Path, forget_sums: Callable[[Path], Path]) -> None:
    forget_sums(folder)
    np.save(folder / "train-documents.npy", np.arange(3))
    corpus = open_corpus(config(path=str(folder)))
    with pytest.raises(DataError, match=r"train-documents\.npy: 3 documents, but meta\.json has 1"):
        _ = corpus.index


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", r"/none: there is no such token file or folder; check data\.path"),
        ("none.npy", r"/none\.npy: there is no such token file"),
        ("text.txt", r"cannot tell what tokens these are from '\.txt'"),
        ("", "no meta.json"),
    ],
)
def test_paths_that_hold_no_tokens(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "text.txt").touch()
    with pytest.raises(DataError, match=message):
        open_corpus(config(path=str(tmp_path / name)))


def test_too_few_tokens_to_split(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(1))
    with pytest.raises(DataError, match="1 tokens cannot be split"):
        open_corpus(config(path=str(tmp_path / "x.npy")))
