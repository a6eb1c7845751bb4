from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caramba.data import ByteTokenizer, Tokenizer, count_bytes, load_tokenizer, train_bpe
from caramba.errors import DataError
from tests.examples import examples

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "class A:\r\n\tpass  # ünïcode ✓ 漢字\n",
    "import os\nimport sys\n" * 20,
]
BPE = train_bpe(TEXTS * 3, 300)
BOTH = pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()], ids=["bpe", "byte"])


@BOTH
@settings(max_examples=examples(60), deadline=None)
@given(text=st.text())
def test_round_trip_and_exact_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert count_bytes(np.array(ids, dtype=np.int64), tokenizer.token_bytes) == len(text.encode())


@BOTH
def test_text_that_spells_the_end_mark_is_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<eos>b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a<eos>b"


@BOTH
def test_documents_end_with_one_end_mark(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_documents(TEXTS)
    for ids, text in zip(encoded, TEXTS, strict=True):
        assert ids.tolist() == [*tokenizer.encode(text), tokenizer.eos_id]
    assert tokenizer.decode(np.concatenate(encoded)) == "".join(TEXTS)
    assert count_bytes(np.concatenate(encoded), tokenizer.token_bytes) == sum(len(t.encode()) for t in TEXTS)


@BOTH
def test_token_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes[tokenizer.eos_id] == 0
    assert (np.delete(tokenizer.token_bytes, tokenizer.eos_id) > 0).all()


@BOTH
def test_saved_and_pickled_are_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for copy in (load_tokenizer(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert (copy.hash, copy.name, copy.vocab_size, copy.eos_id) == (
            tokenizer.hash,
            tokenizer.name,
            tokenizer.vocab_size,
            tokenizer.eos_id,
        )
        assert copy.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_training_is_reproducible_and_learns() -> None:
    again = train_bpe(TEXTS * 3, 300)
    assert again.hash == BPE.hash
    assert len(BPE.encode(TEXTS[2])) < len(TEXTS[2].encode())
    assert BPE.hash != train_bpe(TEXTS * 3, 290).hash


def test_decode_refuses_unknown_ids() -> None:
    with pytest.raises(DataError, match=r"token id 300 is not of bpe-300: ids are 0 to 299"):
        BPE.decode([300])


def test_a_byte_sequence_cut_inside_a_character_is_replaced() -> None:
    assert ByteTokenizer().decode([0xE6, 0xBC]) == "\ufffd"


def test_count_bytes_takes_tensors_of_any_shape_and_refuses_padding() -> None:
    lengths = np.array([0, 1, 5], dtype=np.int32)
    assert count_bytes(torch.tensor([[0, 1], [2, 2]]), lengths) == 11
    assert count_bytes(np.array([], dtype=np.int64), lengths) == 0
    with pytest.raises(DataError, match="token id -100 has no byte count"):
        count_bytes(torch.tensor([1, -100]), lengths)
    with pytest.raises(DataError, match="token id 3 has no byte count: the vocabulary has 3 entries"):
        count_bytes(torch.tensor([1, 3]), lengths)


def test_unreadable_definitions(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match="there is no tokenizer file"):
        load_tokenizer(path)
    path.write_text("{not json")
    with pytest.raises(DataError, match="not a tokenizer definition"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="cannot hold 256 bytes"):
        train_bpe(TEXTS, 200)
