from __future__ import annotations

import base64
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from caramba.data import count_bytes, load_tokenizer, train_bpe
from caramba.data.tokenizer import CL100K, GPT2, QWEN
from caramba.errors import DataError
from tests.examples import examples

TEXTS = [
    "def f(x):\n    return x + 1  # it's\n" * 5,
    "the cat's 12345 hats,\r\n\r\n  naïve café “quoted” text\n",
]


def byte_level(pattern: str | None, merges: int = 40, normalizer: object = None) -> Backend:
    backend = Backend.from_str(train_bpe(TEXTS * 4, 257 + merges).definition)
    if pattern is not None:
        from tokenizers import Regex

        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def folder_of(backend: Backend, folder: Path, **marks: object) -> Path:
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    return folder


def sentencepiece(prefix: bool) -> Backend:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": i + 3 for i in range(256)}
    vocab |= {piece: 259 + i for i, piece in enumerate(["▁", "a", "b", "é", "▁a"])}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.mark.parametrize("pattern", [None, CL100K, QWEN], ids=["gpt2", "cl100k", "qwen"])
def test_pieces_give_the_librarys_ids(pattern: str | None, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(byte_level(pattern), tmp_path / "x", eos_token="<eos>"))
    assert tokenizer._pieces is not None

    @settings(max_examples=examples(150), deadline=None)
    @given(
        st.lists(
            st.sampled_from([*" \n\r\t\x0b\x1c\x85\xa0'aZ1.é漢🙂\u0301_", "'s", "'LL", "the", "  "]),
            max_size=24,
        )
    )
    def check(words: list[str]) -> None:
        text = "".join(words)
        assert tokenizer.encode_documents([text])[0].tolist() == [*tokenizer.encode(text), tokenizer.eos_id]

    check()


def test_added_text_tokens_and_unknown_patterns_take_the_library(tmp_path: Path) -> None:
    backend = byte_level(None)
    backend.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = load_tokenizer(folder_of(backend, tmp_path / "a", eos_token="<eos>"))
    assert tokenizer._pieces is None
    assert tokenizer.token_bytes[tokenizer.encode("<think>")].tolist() == [7]
    other = load_tokenizer(folder_of(byte_level(r"\s+|\S+"), tmp_path / "b", eos_token="<eos>"))
    assert other._pieces is None
    assert other.encode_documents(["a b"])[0].tolist() == [*other.encode("a b"), other.eos_id]


def test_marks_come_from_the_files_beside(tmp_path: Path) -> None:
    backend = byte_level(GPT2)
    backend.add_special_tokens(["<|bos|>", "<|stop|>"])
    eos = {"content": "<|stop|>", "lstrip": False}
    folder = folder_of(backend, tmp_path / "x", eos_token=eos, bos_token="<|bos|>", add_bos_token=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_id == backend.token_to_id("<|stop|>")
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (backend.token_to_id("<|bos|>"), True)
    assert tokenizer.name == "x"
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy" / "tokenizer.json")
    copy = load_tokenizer(tmp_path / "copy")
    assert (copy.hash, copy.bos_id, copy.adds_bos) == (tokenizer.hash, tokenizer.bos_id, True)
    assert copy.hash != load_tokenizer(folder_of(backend, tmp_path / "y", eos_token="<eos>")).hash


def test_sentencepiece_style_bytes() -> None:
    from caramba.data.tokenizer import measure_token_bytes

    backend = sentencepiece(prefix=False)
    lengths, reason = measure_token_bytes(backend, backend.get_vocab_size())
    assert reason is None
    ids = backend.encode("a b é 漢  z").ids
    assert count_bytes(np.array(ids), lengths) == len("a b é 漢  z".encode())
    lengths, reason = measure_token_bytes(sentencepiece(prefix=True), 264)
    assert lengths is None
    assert "invented first space" in str(reason)


def test_a_tokenizer_that_changes_text_has_no_byte_count(tmp_path: Path) -> None:
    folder = folder_of(byte_level(None, normalizer=normalizers.NFKC()), tmp_path / "x", eos_token="<eos>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.token_bytes is None
    assert "changes text" in str(tokenizer.no_bytes_reason)


def merge_by_rank(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair merging as tiktoken defines it, written out."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([value]) for value in piece]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_a_tiktoken_rank_file(tmp_path: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + [
        b"th",
        b"he",
        b" t",
        b"the",
        b" th",
        b" the",
        b"ab",
        b"bc",
        b"abc",
        b"xyz",
    ]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    path = tmp_path / "r50k_base.tiktoken"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in ranks.items()))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.name) == (267, 266, "r50k_base")
    cut = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
    for text in ("the thethe abc bcab xyz  the\n", "it's été 漢字 <|endoftext|> the"):
        expected = [i for piece in cut.findall(text) for i in merge_by_rank(piece.encode(), ranks)]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
        assert count_bytes(np.array(expected), tokenizer.token_bytes) == len(text.encode())
    path.rename(tmp_path / "mine.tiktoken")
    with pytest.raises(DataError, match=r"begins with one of gpt2, r50k_base"):
        load_tokenizer(tmp_path / "mine.tiktoken")
    (tmp_path / "gpt2.tiktoken").write_text("not base64!\n")
    with pytest.raises(DataError, match=r"line 1 is b'not base64!'"):
        load_tokenizer(tmp_path / "gpt2.tiktoken")
    (tmp_path / "gpt2.tiktoken").write_text("QQ== 0\n")
    with pytest.raises(DataError, match="1 ranks without the byte 0"):
        load_tokenizer(tmp_path / "gpt2.tiktoken")


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tokenizer.model").write_text("x")
    with pytest.raises(DataError, match=r"no tokenizer\.json in this folder, found tokenizer\.model; a bare Sent"):
        load_tokenizer(tmp_path / "empty")
    backend = Backend(models.BPE({"a": 0}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="cannot tell which token ends a document"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(DataError, match="name '</s>' as a mark, and the vocabulary has no such entry"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_that_lacks_a_merged_token_is_refused(tmp_path: Path) -> None:
    """The library panics on some of these, which is no Exception."""
    intact = train_bpe(["some text to train a tokenizer on " * 20], 280).definition
    vocab = json.loads(intact)["model"]["vocab"]
    panics = []
    for token in sorted(vocab, key=vocab.get)[260:]:
        broken = json.loads(intact)
        del broken["model"]["vocab"][token]
        text = json.dumps(broken)
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(DataError, match=r"tokenizer\.json: .* not a tokenizer definition") as refusal:
            load_tokenizer(tmp_path)
        panics.append(not isinstance(refusal.value.__cause__, Exception))
    assert any(panics)
