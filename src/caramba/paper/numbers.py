"""Which numbers a section may hold as they are: names, years of cited works, indices, plain counts.

Everything else that counts or measures is written by its key, so that code puts it in, separate from others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from caramba.paper.latex import AUTHOR, HOLE, REFERENCE, VALUE, YEAR, Finding, FormulaRow

Text = list[tuple[str, int]]

# Number formats, norms, ranks and devices, whose digits count nothing in the paper.
_NAMES = (
    "fp4 fp8 fp16 fp32 fp64 bf16 tf32 int4 int8 nf4 q4_0 q8_0 float8 float16 float32 float64 bfloat16 "
    "l1 l2 top-1 top-5 f1 1d 2d 3d 1-d 2-d 3-d 4-bit 8-bit 16-bit 32-bit 64-bit utf-8 "
    "a100 h100 h200 b200 gpt-2 gpt-3 gpt-4 t5"
)
KNOWN_NAMES = frozenset(_NAMES.split())
_WORDS = re.compile(rf"[^\s()\[\]{{}};\"'/\u2013\u2014{HOLE}]+")
_NAME = re.compile(r"[a-z][\w.+-]*")
_LINKS = re.compile(r"[-_/:\s]+")
_YEAR = re.compile(r"(?:19|20)[0-9]{2}")
# "In 2017, …", "(2017)", "et al. 2017": a year, where no noun follows that it would count.
_BEFORE_YEAR = re.compile(
    r"(?:\b(?:in|since|until|before|after|during|year|early|late)|\bal\.|[(,])[\s,]*$", re.IGNORECASE
)
_AFTER_YEAR = re.compile(
    rf"\s*(?:$|[.,;:)!?{HOLE}]|(?:the|a|an|we|they|it|this|these|and|by|with|to|on|as|but|when|where|was|is)\b)",
    re.IGNORECASE,
)


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


def in_prose(text: Text, names: Names, years: Collection[str]) -> Iterator[Finding]:
    """Yield the numbers of a paragraph that are no name and no year of a work that the paragraph cites."""
    letters = "".join(letter for letter, _ in text)
    before = ""
    for found in _WORDS.finditer(letters):
        word = found[0].strip(".,:?!*")
        if any(letter.isnumeric() for letter in word) and not (
            names.knows(word, before) or (word in years and _reads_as_year(letters, word, found.start()))
        ):
            yield Finding(word, text[found.start()][1])
        before = word
    for claim, start in claims(letters):
        yield Finding(claim, text[start][1])


def _reads_as_year(letters: str, word: str, at: int) -> bool:
    before, end = letters[max(0, at - 20) : at], letters.index(word, at) + len(word)
    is_alone = _AFTER_YEAR.match(letters, end) is not None
    return is_alone and _YEAR.fullmatch(word) is not None and _BEFORE_YEAR.search(before) is not None


# Words between which nothing ends: neither a sentence nor a bracket nor a cell.
_GAP = r"[^\w.,;!?()\[\]\u00d7]+"
_END = r"(?=\s*(?:$|[.,;!?)]))"
_COUNT = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
_PART = "third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|hundredth|thousandth"
_MEASURE = (
    "times|fold|percent|percentage|points?|nats|bits|bytes|[kmg]i?b|ms|tokens|steps|epochs|hours|minutes|"
    "(?:milli|micro)?seconds|parameters|layers|heads|orders|flops|watts|halves"
)
# What may stand behind a number, but not between a count and what is counted: "reaches seven on a CPU".
_BEHIND = "on|in|out|at|with|while|when|but|than|against|for|from|after|before|compared|versus|is|are"
_CLAIM = re.compile(
    r"\b(?:twice|thrice|tens|dozens?|half(?![\s-]+(?:precision|open|life|width|plane|space)\b)|halv\w+|"
    r"(?:doubl|tripl|quadrupl|quintupl)(?:e|es|ed|ing)|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    rf"(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:hundred|thousand|(?:m|b|tr)illion|{_PART})s|"
    rf"hundred|thousand|(?:m|b|tr)illion|(?:{_COUNT})fold|"
    rf"(?:an?|one){_GAP}(?:{_PART})(?={_END}|{_GAP}(?:of|as|the|less|more|fewer|\w+er)\b)|"
    rf"(?:zero|one|{_COUNT})(?={_GAP}(?:{_MEASURE})\b|[^\w.,;!?]*\u00d7|{_GAP}point{_GAP}\w)|"
    rf"(?:of|has|reaches|is|are|by|at){_GAP}(?:zero|{_COUNT})(?:{_END}|(?={_GAP}(?:{_BEHIND})\b))|"
    rf"(?:(?<=;\s)|(?<=^\s))(?:{_COUNT}){_END}|(?:{_COUNT}){_GAP}(?:in|out{_GAP}of){_GAP}(?:{_COUNT}))\b",
    re.IGNORECASE,
)
_ROMAN = re.compile(
    r"(?<!Type )(?<!Part )(?<!Section )(?<!Table )\b(?=[MDCLXVI]{2})M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})"
    rf"(?:IX|IV|V?I{{0,3}})\b(?:(?<=[MDCLXVI]{{4}})|(?<=[XVI]{{3}})|(?=\s+(?:{_MEASURE})\b)(?<=[XVI]))"
)


def claims(text: str) -> Iterator[tuple[str, int]]:
    """Yield the number words that claim something, such as "twice" or "a perplexity of seven", with their places.

    "Two models" and "one block" are no claims.
    """
    for pattern in (_CLAIM, _ROMAN):
        for found in pattern.finditer(text):
            yield " ".join(found[0].replace(HOLE, " ").split()), found.start()


_GLUED = (
    "a value that a command prints and another number stand side by side and read as one; put an operator or words "
    "between them"
)
_BETWEEN = frozenset((",", ";", ":", "cdot", "mid", "|", "ldots", "cdots", "dots"))


def in_formula(row: FormulaRow) -> Iterator[tuple[Finding, bool]]:
    """Yield the numbers of a row that are more than structure, and True for faults of values that meet others.

    Structure is an index or exponent of one digit, and 0, 1 or 2 in a displayed formula, a fraction or a root.
    Numbers without an operator between them are read together.
    """
    before = script = ""
    has_letter = has_comma = False
    for token in row.tokens:
        if token.kind in "nvc":
            before = "" if has_letter and has_comma else before
            joined, number = before or script, (before or script) + token.text
            if joined and VALUE in number:
                yield Finding(_GLUED, token.line), True
            elif (joined and token.kind != "v") or (token.kind == "n" and not _is_structure(number, row)):
                yield Finding(number[:60], token.line), False
            before, has_letter, has_comma = number[:60], False, False
        elif token.kind in "o\n":
            before = ""
        elif token.text in (".", ",", ":") and before:
            before += token.text
        has_letter |= token.kind == "l"
        has_comma |= token.text in _BETWEEN and token.kind not in "nvc"
        script = token.text if token.kind == "^" else ""


def _is_structure(number: str, row: FormulaRow) -> bool:
    is_index = row.is_script and len(number) == 1 and number.isascii()
    return is_index or (row.is_inner and number in ("0", "1", "2"))


_ANY = f"{VALUE}{REFERENCE}{YEAR}"
_MEETING = re.compile(rf"[{_ANY}](?=(?P<joint>[\s.,:;'`\"eE|\u00b7]*)[{_ANY}])")
_LISTED = re.compile(r"[.,:]\s+|[\s;]*;\s+")  # ends a sentence or parts a list, as on paper
_MINUS = re.compile(
    rf"(?:^|[^\w)\]}}\ufffc{VALUE}-])[-\u2212\u2013]+\s*(?={VALUE})|(?<!{VALUE} )\b(?:minus|negative)\s+(?={VALUE})"
)
_SUFFIXED = re.compile(rf"{VALUE}(?!(?:x|th|D|B)(?![^\W\d_]))(?=[^\W\d_])")
_AFTER_DIGIT = re.compile(rf"[0-9][.,]?{VALUE}|{VALUE}[.,]?[0-9]")
_NUMBERED = re.compile(
    r"(?:\b(?:tables?|tabs?\.?|figures?|figs?\.?|sections?|secs?\.?|equations?|eqs?\.?|appendix|appendices|chapters?|"
    rf"pages?|p\.|items?|lines?|footnotes?)|\u00a7|(?-i:\bSee)|\(see)[\s(]*$|"
    rf"{REFERENCE}(?:,\s+|\)?,?\s*(?:\b(?:and|or|to|through)\b|[\u2013\u2014&-]+)\s*)\(?$",
    re.IGNORECASE,
)
_AUTHORED = re.compile(rf"(?:{AUTHOR}|\b[A-Z][^\W\d_]+|\bal\.)(?:['\u2019]s?)?,?\s*$")
_BEHIND_YEAR = re.compile(r"\s*(?:$|[).,;:\]?!])")
_NEAR = 60  # characters before a mark that are looked at

VALUES_MEET = (
    "numbers that commands print stand side by side and read as one; put words or a comma and a space there"
)
NEGATED = "a minus before a value changes it; \\result and \\derived print the sign that a value has"
SUFFIX = "letters stand directly behind a value and would scale it; put a space before a unit"
TOUCHES_DIGIT = "a value touches digits and reads as one number with them; put words between them"
UNNAMED = (
    "a reference without its word reads as a number; write Table, Figure, Section, Equation or page before it, as in "
    "Table~\\ref{tab:caramba-NAME}"
)
YEAR_LOOSE = (
    "the year or number of a cited work reads as a measured one here; write it in parentheses or behind its author's "
    "name, with punctuation after it, or use \\citep or \\citet"
)


def adjacent(text: Text) -> Iterator[Finding]:
    """Yield what is wrong with the places of values, references and years: two settings with a point between them are
    3.3 on paper."""
    letters = "".join(letter for letter, _ in text)
    for what, pattern in {NEGATED: _MINUS, SUFFIX: _SUFFIXED, TOUCHES_DIGIT: _AFTER_DIGIT}.items():
        yield from (Finding(what, text[found.start()][1]) for found in pattern.finditer(letters))
    for found in _MEETING.finditer(letters):
        if not _LISTED.fullmatch(found["joint"]):
            yield Finding(VALUES_MEET, text[found.start()][1])
    for at, letter in enumerate(letters):
        before = letters[max(0, at - _NEAR) : at] if letter in (REFERENCE, YEAR) else ""
        if letter == REFERENCE and not _NUMBERED.search(before):
            yield Finding(UNNAMED, text[at][1])
        is_named = _AUTHORED.search(before) or before.rfind("(") > before.rfind(")")
        if letter == YEAR and not (is_named and _BEHIND_YEAR.match(letters, at + 1)):
            yield Finding(YEAR_LOOSE, text[at][1])
