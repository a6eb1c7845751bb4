from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caramba.data import ByteTokenizer, open_benchmark_text, train_bpe
from caramba.data.folder import SplitWriter, write_meta, write_token_folder, write_tokenizer
from caramba.errors import DataError


def test_a_folder_is_measured_on_its_validation_split(tmp_path: Path) -> None:
    splits = {"train": ["trained on this"], "val": ["held out"]}
    write_token_folder(tmp_path / "f", splits, ByteTokenizer(), {})
    text = open_benchmark_text(tmp_path / "f")
    assert text.is_held_out
    assert bytes(text.tokens[:-1].astype(np.uint8)) == b"held out"
    assert text.token_bytes is not None
    text.check(257, 8, ByteTokenizer())
    with pytest.raises(DataError, match=r"val-00000.npy: 9 tokens, one window needs 10"):
        text.check(257, 9)
    with pytest.raises(DataError, match=r"made with byte of 257, the model has vocab_size=256"):
        text.check(256, 4)
    other = train_bpe(["some text to merge, some more text"], 260)
    with pytest.raises(DataError, match=r"made with byte \(\w{8}\), the run's data with bpe-260 "):
        text.check(260, 4, other)


def test_without_a_validation_split_all_is_measured_on(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    with SplitWriter(tmp_path, "train", np.dtype(np.uint16), 100) as out:
        out.add(tokenizer.encode_documents(["all of it"])[0], 9)
        facts = out.finish()
    write_tokenizer(tmp_path, tokenizer)
    write_meta(tmp_path, tokenizer, {"train": facts}, {})
    text = open_benchmark_text(tmp_path)
    assert (text.is_held_out, text.tokens.size) == (False, 10)


def test_the_ids_of_a_bare_file_are_held_against_the_model(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([1, 2, 90, 3], dtype=np.uint16))
    text = open_benchmark_text(tmp_path / "x.npy")
    text.check(91, 3)
    with pytest.raises(DataError, match=r"x.npy: tokens reach id 90, the model has vocab_size=90"):
        text.check(90, 3)
    with pytest.raises(DataError, match="there is no such token file"):
        open_benchmark_text(tmp_path / "y.npy")
