"""Text while it comes: whole characters, and stop texts wherever tokens end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from caramba.data import ByteTokenizer, Tokenizer
from caramba.data.tokenizer import train_bpe
from caramba.infer.row import TextStream

TEXT = st.text(alphabet="abcé€😀 \n", max_size=24)
BPE = train_bpe(["abc abc aabbcc é€ é€ 😀😀 ab\nc"] * 4, 300)


def streamed(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> tuple[str, bool]:
    stream = TextStream(tokenizer, tokenizer.encode("x "), stop)
    text = "".join(stream.push([token]) for token in tokens) + stream.close()
    return text, stream.is_stopped


def cut(text: str, stop: list[str]) -> tuple[str, bool]:
    """Character by character: the first end of a stop text, of those that end there the longest."""
    for end in range(1, len(text) + 1):
        ended = [text[:end].removesuffix(s) for s in stop if text[:end].endswith(s)]
        if ended:
            return min(ended, key=len), True
    return text, False


@given(TEXT, st.lists(st.text(alphabet="abcé€😀 ", min_size=1, max_size=4), max_size=3), st.booleans())
def test_a_stream_is_the_text_up_to_the_stop(text: str, stop: list[str], is_byte: bool) -> None:
    tokenizer = ByteTokenizer() if is_byte else BPE
    assert streamed(tokenizer, tokenizer.encode(text), stop) == cut(text, stop)


@given(st.lists(st.integers(0, 256), max_size=20))
def test_a_stream_of_any_bytes_is_what_decode_gives(tokens: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert streamed(tokenizer, tokens, [])[0] == tokenizer.decode(tokens)


def test_no_piece_is_cut_later() -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, stop=["END"])
    pieces = [stream.push([token]) for token in tokenizer.encode("aENé ENDz")]
    assert pieces == ["a", "", "", "", "ENé", " ", "", "", "", ""]
    assert stream.is_stopped
    assert stream.close() == ""


def test_entries_that_only_the_model_has_are_no_text() -> None:
    assert streamed(ByteTokenizer(), [97, 300, 98], []) == ("ab", False)
