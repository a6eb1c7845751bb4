"""Number words that claim something: "twice as fast", "fifty percent", "a perplexity of seven", "an eighth of it".

A text is cut into words once and read in one pass. "Two models" and "one block" are no claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from caramba.paper.scanned import HOLE


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[^\W\d_]+|\u00d7|[.,;!?()\[\]]")
_ENDS = _words(". , ; ! ? )")
_LARGE = _words(
    "thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty "
    "ninety hundred thousand million billion trillion dozen"
)
_SMALL = _words("two three four five six seven eight nine ten eleven twelve")
_COUNTS = _SMALL | _LARGE | {"zero", "one"}
_MANY = _words("hundreds thousands millions billions trillions dozens")
_MEASURES = _words(
    "\u00d7 times fold percent percentage points nats bits bytes kilobytes megabytes gigabytes kb mb gb kib mib gib ms "
    "tokens steps epochs hours minutes seconds milliseconds microseconds parameters layers heads orders flops watts"
)
_MULTIPLES = _words("twofold twice thrice") | {f"{count}fold" for count in _COUNTS}
_MULTIPLIED = re.compile(r"(?:doubl|tripl|quadrupl|quintupl|halv)(?:e|es|ed|ing)")
_PARTS = _words("third quarter fifth sixth seventh eighth ninth tenth twelfth hundredth thousandth millionth")
_PLURAL_PARTS = frozenset(part + "s" for part in _PARTS) | {"halves"}
# "A third model" is an order, "a third of it" and "a third less" are sizes.
_SIZED = _ENDS | _words(
    "of as the less more fewer smaller larger lower higher faster slower better worse cheaper"
)
_WHOLE_HALVES = _words("precision open life width plane space")
# What may stand behind a number, but not between a count and what is counted: "reaches seven on a CPU".
_BEHIND = _ENDS | _words(
    "on in at with while when where which but than against for from after before compared versus is are and"
)
_KNOWN_COUNT = _words("the these those all both other any every first last next its their our another")
_ROMAN = re.compile(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")
_NUMBERED = _words(
    "type part phase stage class kind section table figure appendix chapter theorem version war level"
)


def claims(text: str) -> Iterator[tuple[str, int]]:
    """Yield the claims of a text, each with the place where it begins."""
    found = list(_WORD.finditer(text))
    words = [match[0].lower() for match in found]
    at = 0
    while at < len(words):
        end = _claim_end(words, at) or _roman_end(found, words, at)
        if end:
            claim = text[found[at].start() : found[end - 1].end()].replace(HOLE, " ")
            yield " ".join(claim.split()), found[at].start()
        at = end or _run_end(words, at) or at + 1


def _claim_end(words: list[str], at: int) -> int | None:
    """Return where the claim ends that begins at a word."""
    word, after, then = words[at], _at(words, at + 1), _at(words, at + 2)
    if word in _MANY or word in _MULTIPLES or _MULTIPLIED.fullmatch(word):
        return at + 1
    if word == "tens" and after == "of":
        return at + 2
    if word == "half":
        return None if after in _WHOLE_HALVES else at + 1
    if word in ("a", "an", "one") and (
        (after in _PARTS and (not then or then in _SIZED)) or after in ("half", *_PLURAL_PARTS)
    ):
        return None if after == "half" and then in _WHOLE_HALVES else at + 2
    if word in ("factor", "factors") and after == "of":
        start = at + 3 if then in ("about", "roughly", "nearly", "almost", "over", "up") else at + 2
        return _run_end(words, start)
    end = _run_end(words, at)
    return None if end is None or not _is_claim(words, at, end) else _with_measure(words, end)


def _is_claim(words: list[str], at: int, end: int) -> bool:
    """Whether the count words from `at` to `end` are more than "two" in "two models"."""
    run, after, before = words[at:end], _at(words, end), _at(words, at - 1)
    if any(word in _LARGE or word in ("point", "half") for word in run) or after in _MEASURES:
        return True
    if after in _PLURAL_PARTS:
        return True
    if (after == "in" or (after == "out" and _at(words, end + 1) == "of")) and _at(
        words, end + 1 + (after == "out")
    ) in _COUNTS:
        return True
    is_last = not after or after in _BEHIND
    if after == "and" and _at(words, end + 1) not in _KNOWN_COUNT | {"a", "an"}:
        is_last = False  # "two and more kinds"
    if run[-1] in ("zero", "one"):  # "the first one", "goes to zero"
        return is_last and before == "of" and _at(words, at - 2) not in ("", "one", "that", "out")
    return is_last and before not in _KNOWN_COUNT


def _run_end(words: list[str], at: int) -> int | None:
    """Return where a run of count words ends: "two hundred and fifty", "one and a half", "one point five"."""
    if _at(words, at) not in _COUNTS:
        return None
    end = at + 1
    while True:
        word, after, then = _at(words, end), _at(words, end + 1), _at(words, end + 2)
        if word in _COUNTS:
            end += 1
        elif word in ("and", "point") and after in _COUNTS:
            end += 2
        elif word == "and" and after == "a" and then == "half":
            end += 3
        elif word == "and" and after == "half":
            end += 2
        else:
            return end


def _roman_end(found: list[re.Match[str]], words: list[str], at: int) -> int | None:
    """Return where a Roman number ends that measures something, or that is too long to be an abbreviation."""
    word = found[at][0]
    if len(word) < 2 or not _ROMAN.fullmatch(word):
        return None
    is_counting = _at(words, at + 1) in _MEASURES and (len(word) > 2 or set(word) <= set("IVX"))
    is_plain = len(word) > 3 or (len(word) == 3 and set(word) <= set("IVX"))
    if is_counting or (is_plain and _at(words, at - 1) not in _NUMBERED):
        return _with_measure(words, at + 1)
    return None


def _with_measure(words: list[str], end: int) -> int:
    return end + (_at(words, end) in _MEASURES | _PLURAL_PARTS)


def _at(words: list[str], index: int) -> str:
    return words[index] if 0 <= index < len(words) else ""
