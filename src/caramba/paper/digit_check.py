"""Which digits and number words may appear in a section as they are: names, years of cited works, indices in formulas.

Everything else that counts or measures is written by its key, so that code puts it in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from caramba.paper.number_words import claims
from caramba.paper.scanned import HOLE, Numeral

# Number formats, norms, ranks and devices, whose digits count nothing in the paper.
_FORMATS = "fp4 fp8 fp16 fp32 fp64 bf16 tf32 int4 int8 nf4 q4_0 q8_0 float8 float16 float32 float64 bfloat16"
_TERMS = "l1 l2 top-1 top-5 f1 1d 2d 3d 1-d 2-d 3-d 4-bit 8-bit 16-bit 32-bit 64-bit utf-8"
_MAKES = "a100 h100 h200 b200 gpt-2 gpt-3 gpt-4 t5"
KNOWN_NAMES = frozenset(f"{_FORMATS} {_TERMS} {_MAKES}".split())
_WORDS = re.compile(rf"[^\s()\[\]{{}};\"'/\u2013\u2014{HOLE}]+")
_TRIMMED = ".,:?!*"
_NAME = re.compile(r"[a-z][\w.+-]*")
_YEAR = re.compile(r"(?:19|20)[0-9]{2}")
_LINKS = re.compile(r"[-_/:\s]+")

# "In 2017, …", "(2017)", "et al. 2017": a year, where no noun follows that it would count.
_BEFORE_YEAR = re.compile(
    r"(?:\b(?:in|since|until|before|after|during|year|early|late)|\bal\.|[(,])[\s,]*$", re.IGNORECASE
)
_AFTER_YEAR = re.compile(
    rf"\s*(?:$|[.,;:)!?{HOLE}]|(?:the|a|an|we|they|it|this|these|and|by|with|to|on|as|but|when|where|was|is)\b)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ungrounded:
    """A number in the text that nothing vouches for."""

    text: str
    line: int
    is_formula: bool = False


class Names:
    """Words that may hold digits: those of the manifest and of the titles of cited works."""

    def __init__(self, texts: Iterable[str]) -> None:
        lowered = [text.lower() for text in texts]
        self._phrases = [f" {_LINKS.sub(' ', text)} " for text in lowered]
        self._words = {word for text in lowered for word in re.split(r"[\s/:,=()]+", text)}

    def knows(self, word: str, before: str) -> bool:
        """Whether a word with digits is a name, or with the word before it: `llama32`, `Llama 3.2`."""
        word, before = word.lower(), before.lower()
        if word in KNOWN_NAMES or (_NAME.fullmatch(word) and word in self._words):
            return True
        if len(before) < 3 or not before.isalpha():
            return False
        phrase = f" {before} {_LINKS.sub(' ', word)} "
        return any(phrase in text for text in self._phrases)


def in_prose(text: list[tuple[str, int]], names: Names, years: Collection[str]) -> Iterator[Ungrounded]:
    """Yield the numbers of a paragraph that are no name and no year of a work that the paragraph cites."""
    letters = "".join(letter for letter, _ in text)
    before = ""
    for found in _WORDS.finditer(letters):
        word = found[0].strip(_TRIMMED)
        line = text[found.start()][1]
        if any(letter.isnumeric() for letter in word) and not (
            names.knows(word, before) or (word in years and _reads_as_year(letters, word, found.start()))
        ):
            yield Ungrounded(word, line)
        before = word
    for claim, start in claims(letters):
        yield Ungrounded(claim, text[start][1])


def _reads_as_year(letters: str, word: str, at: int) -> bool:
    before = letters[max(0, at - 20) : at]
    end = letters.index(word, at) + len(word)
    is_alone = _AFTER_YEAR.match(letters, end) is not None
    return is_alone and _YEAR.fullmatch(word) is not None and _BEFORE_YEAR.search(before) is not None


def in_mathematics(numerals: Iterable[Numeral]) -> Iterator[Ungrounded]:
    """Yield the numbers of formulas that are more than structure: an index or exponent of one digit, 0, 1 or 2 in a
    displayed formula, a fraction or a root."""
    for numeral in numerals:
        is_index = numeral.is_script and len(numeral.text) == 1 and numeral.text.isascii()
        if not (is_index or (numeral.is_inner and numeral.text in ("0", "1", "2"))):
            yield Ungrounded(numeral.text, numeral.line, is_formula=True)
