from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from caramba.data import NpyDataset, TokensDataset, build_token_dataset
from caramba.data import token_file as token_file_module
from caramba.data.folder import NpyWriter, open_npy
from caramba.data.token_file import open_token_file
from caramba.errors import DataError


@pytest.mark.parametrize("dtype", ["<u2", "<i8", ">u4", "u1"])
def test_npy_is_mapped_as_it_is(tmp_path: Path, dtype: str) -> None:
    ids = np.arange(100).astype(dtype)
    np.save(tmp_path / "x.npy", ids)
    opened = open_token_file(tmp_path / "x.npy")
    assert isinstance(opened.tokens, np.memmap)
    assert not opened.tokens.flags.writeable
    assert opened.tokens.dtype == np.dtype(dtype)
    assert (opened.tokens == ids).all()
    assert opened.max_id == 99


def test_streamed_npy_is_what_numpy_reads(tmp_path: Path) -> None:
    with NpyWriter(tmp_path / "x.npy", np.dtype(np.uint16)) as out:
        for start in range(0, 50, 7):
            out.append(np.arange(start, min(start + 7, 50)))
    assert np.load(tmp_path / "x.npy").tolist() == list(range(50))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(10, np.float32), r"x\.npy: dtype float32, expected integers such as uint16"),
        (np.zeros(10, bool), "dtype bool, expected integers"),
        (np.zeros((4, 5), np.uint16), r"shape \(4, 5\), expected one dimension"),
        (np.zeros(0, np.uint16), "holds 0 tokens"),
        (np.array([3, -1, 2]), "smallest token id is -1; token ids start at 0"),
        (np.array([{}], dtype=object), "dtype object, expected integers"),
    ],
)
def test_wrong_arrays(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(DataError, match=message):
        open_token_file(tmp_path / "x.npy")


def test_truncated_npy_names_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    os.truncate(path, 1000)
    with pytest.raises(DataError, match=r"1000 tokens of uint16 \(2128 bytes\), found 1000 bytes"):
        open_npy(path)
    os.truncate(path, 20)
    with pytest.raises(DataError, match=r"20 bytes that are not a \.npy array"):
        open_npy(path)


def test_missing_foreign_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.npy: there is no such token file"):
        open_token_file(tmp_path / "none.npy")
    (tmp_path / "x.npy").write_text("1 2 3")
    with pytest.raises(DataError, match=r"5 bytes that are not a \.npy array"):
        open_token_file(tmp_path / "x.npy")
    (tmp_path / "x.bin").write_bytes(b"1234")
    for opener in (open_token_file, lambda path: build_token_dataset(path=path, block_size=2)):
        with pytest.raises(DataError, match=r"'\.bin'; expected \.npy, \.tokens"):
            opener(tmp_path / "x.bin")


@pytest.mark.parametrize("chunk", [8, 64, 4 << 20])
def test_tokens_text_is_parsed_whatever_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(token_file_module, "_CHUNK_BYTES", chunk)
    draw = random.Random(0)
    ids = [draw.choice([0, 7, 65535, 65536, 2**32 - 1, draw.randrange(100_000)]) for _ in range(500)]
    text = "\n\t " + "".join(f"{i}{draw.choice([' ', chr(10), '   ', chr(9), chr(13) + chr(10)])}" for i in ids)
    (tmp_path / "x.tokens").write_bytes(text.encode())
    assert open_token_file(tmp_path / "x.tokens").tokens.tolist() == ids
    (tmp_path / "y.tokens").write_bytes(text.strip().encode())
    assert open_token_file(tmp_path / "y.tokens").tokens.tolist() == ids


@pytest.mark.parametrize("chunk", [16, 4 << 20])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 22 x3 4", r"token 2 at byte 5 is 'x3'"),
        ("1 22 333 4444 55555 6 7 1.5 4", r"token 7 at byte 24 is '1\.5'"),
        ("1 -2 3", "token 1 at byte 2 is '-2'"),
        ("1 2 4294967296", "token 2 at byte 4 is '4294967296'; expected an integer from 0 to 4294967295"),
        ("5 99999999999999999999999999", "token 1 at byte 2 is '9999"),
        ("   \n ", "5 bytes and 0 tokens"),
        ("", "0 bytes and 0 tokens"),
    ],
)
def test_bad_tokens_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, chunk: int) -> None:
    monkeypatch.setattr(token_file_module, "_CHUNK_BYTES", chunk)
    path = tmp_path / "x.tokens"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        open_token_file(path)
    assert not list((tmp_path / "home").rglob("tokens-*"))


def test_a_token_without_end_is_refused_before_it_fills_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file_module, "_CHUNK_BYTES", 128)
    (tmp_path / "x.tokens").write_text("1" * 1000)
    with pytest.raises(DataError, match="token 0 at byte 0 is '1111"):
        open_token_file(tmp_path / "x.tokens")


def test_sidecar_is_reused_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    path.write_text("1 2 3")
    said: list[str] = []
    assert open_token_file(path, progress=said.append).tokens.tolist() == [1, 2, 3]
    assert said
    said.clear()
    assert open_token_file(path, progress=said.append).max_id == 3
    assert not said  # neither parsed nor scanned again
    path.write_text("1 2 9 9")
    assert open_token_file(path).tokens.tolist() == [1, 2, 9, 9]
    assert open_token_file(path).max_id == 9


def test_datasets_by_suffix(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    (tmp_path / "x.tokens").write_text(" ".join(map(str, range(10))))
    npy = build_token_dataset(path=tmp_path / "x.npy", block_size=3)
    text = build_token_dataset(path=str(tmp_path / "x.tokens"), block_size=3)
    assert isinstance(npy, NpyDataset)
    assert isinstance(text, TokensDataset)
    assert len(npy) == len(text) == 3
    assert [x.tolist() for x, _ in npy] == [x.tolist() for x, _ in text] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(DataError, match=r"expected a \.tokens file"):
        TokensDataset(tmp_path / "x.npy", 3)


def test_a_large_file_is_never_whole_in_memory(tmp_path: Path) -> None:
    path, tokens = tmp_path / "x.npy", 32_000_000
    with NpyWriter(path, np.dtype(np.uint16)) as out:
        out.append(np.arange(1000))
        out.count = tokens
    os.truncate(path, 128 + 2 * tokens)  # sparse: the rest reads as zeros
    tracemalloc.start()
    try:
        dataset = NpyDataset(path, 1024)
        for index in range(0, len(dataset), 16):
            dataset[index]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(dataset) == (tokens - 1) // 1024
    assert peak < 16 << 20 < 2 * tokens
