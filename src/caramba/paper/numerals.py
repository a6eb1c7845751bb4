"""Which digits and number words may stand in a section as they are: names, years of cited works, indices in formulas.

Everything else that counts or measures is written by its key, so that code puts it in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

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

_LARGE = (
    "(?:thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|"
    "ninety|hundred|thousand|million|billion|dozen)"
)
_COUNT = f"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|{_LARGE})"
_MEASURE = (
    "(?:times|fold|percent|per-cent|percentage|points|nats|bits|bytes|kilobytes|megabytes|gigabytes|tokens|steps|epochs|"
    "hours|minutes|seconds|milliseconds|parameters|layers|heads|orders)"
)
# "twice as fast", "half the cache", "a threefold speed-up", "fifty percent": claims, as digits are.
_CLAIMS = re.compile(
    rf"\b(?:{_COUNT}(?:[- ](?:and[- ])?(?:a[- ])?(?:{_COUNT}|half|point))*[- ]{_MEASURE}\b"
    rf"|(?:{_COUNT}[- ])*{_LARGE}(?:[- ](?:and[- ])?{_COUNT})*\b|{_COUNT}[- ]point[- ]{_COUNT}\b"
    rf"|factors?[- ]of[- ](?:about[- ]|roughly[- ])?{_COUNT}\b|{_COUNT}-?fold\b|twofold\b|twice\b|thrice\b"
    r"|(?:doubl|tripl|quadrupl|halv)(?:e|es|ed|ing)\b"
    r"|(?:a|one|two|three)[- ](?:third|quarter|fifth|tenth)s?\b"
    r"|half(?![- ]?(?:precision|open|life|width|plane|space))\b)",
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
            names.knows(word, before) or (_YEAR.fullmatch(word) and word in years)
        ):
            yield Ungrounded(word, line)
        before = word
    for found in _CLAIMS.finditer(letters):
        yield Ungrounded(" ".join(found[0].split()), text[found.start()][1])


def in_mathematics(numerals: Iterable[Numeral]) -> Iterator[Ungrounded]:
    """Yield the numbers of formulas that are more than structure: an index or exponent of one digit, 0, 1 or 2 in a
    displayed formula, a fraction or a root."""
    for numeral in numerals:
        is_index = numeral.is_script and len(numeral.text) == 1 and numeral.text.isascii()
        if not (is_index or (numeral.is_inner and numeral.text in ("0", "1", "2"))):
            yield Ungrounded(numeral.text, numeral.line, is_formula=True)
