"""Finds digits and number words that no command of the paper prints, and values that would read as another number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

Text = list[tuple[str, int]]
"""Characters and the marks below, each with its line."""
Found = tuple[str, int]
"""What is wrong, and its line."""

# No section may hold these. They represent what is printed: by code, a number or the name of an author before one, ...
VALUE, REFERENCE, YEAR, AUTHOR = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
HOLE = "\ufffc"  # ... what is neither a letter nor a number, ...
# ... and in a row of a formula: a letter, a group that prints nothing, a script and a cell, of a number or of others.
LETTER, EMPTY, _NUMBERED_SCRIPT, _SCRIPT, _NUMBERED_CELL = "\ue018", "\ue017", "\ue019", "\ue01b", "\ue01c"
BREAK = " ; "  # between paragraphs, cells and items, which are separate on the page

UNGROUNDED = (
    "is a number that no artifact vouches for; write \\result{KEY}, \\setting{PATH}, \\derived{ratio}{KEY}{KEY}, "
    "\\citednumber{CITATION}{VALUE} or \\citeyear{CITATION}, or use words"
)

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


# Words between which nothing ends: neither a sentence nor a bracket nor a cell.
_GAP = r"[^\w.,;!?()\[\]\u00d7]+"
_END = r"(?=\s*(?:$|[.,;!?)]))"
_COUNT = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
_PART = "third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|hundredth|thousandth"
_MEASURE = (
    "times|fold|percent|percentage|points?|nats|bits|bytes|[kmg]i?b|ms|tokens|steps|epochs|hours|minutes|"
    "(?:milli|micro)?seconds|parameters|layers|heads|orders|flops|watts|halves"
)
# What may be behind a number, but not between a count and what is counted: "reaches seven on a CPU".
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


GLUED = (
    "a value that a command prints and another number stand side by side and read as one; put an operator or words "
    "between them"
)
BASELESS = "a sub- or superscript needs a letter or a bracket before it; digits, values and empty groups are no base"
_NUMBER = re.compile(f"[0-9]+|{VALUE}|{_NUMBERED_CELL}")
_HAS_LETTER = re.compile(rf"[^\W\d]|{LETTER}")
# An operator, or a comma or bar that follows a letter, separates two numbers.
_PARTS = re.compile(rf"(?:(?!(?:[^\W\d]|{LETTER})[^0-9{VALUE}{_NUMBERED_CELL}]*[,;:|])[^=+*/<>\u00d7\n-])+")
_BASE = re.compile(rf"(?:[^\W\d_]|[{LETTER}{_SCRIPT}{_NUMBERED_SCRIPT}]|[^\s(\[{{]\s*[)\]}}|])\Z")
_NEAR = 60  # characters before a script that are looked at for its base


def is_base(row: Text) -> bool:
    """Whether what a row ends with can have a sub- or superscript."""
    return _BASE.search("".join(letter for letter, _ in row[-_NEAR:])) is not None


def mark_of(row: Text, *, is_script: bool) -> str:
    """Return what represents a script or a cell in the row that it is in."""
    letters = "".join(letter for letter, _ in row)
    has_number = _NUMBER.search(letters) is not None
    if is_script:
        return _NUMBERED_SCRIPT if has_number and len(letters) == 1 else _SCRIPT
    if has_number:
        return VALUE if VALUE in letters else _NUMBERED_CELL
    return LETTER if _HAS_LETTER.search(letters) else EMPTY


def check_row(row: Text, *, is_script: bool, is_inner: bool) -> Iterator[Found]:
    """Yield what is wrong with the numbers of a row: those without an operator between them are read together.

    A number alone is structure as an index or exponent of one digit, and as 0, 1 or 2 in a displayed formula, a
    fraction or a root.
    """
    letters = "".join(letter for letter, _ in row)
    for part in _PARTS.finditer(letters):
        numbers = list(_NUMBER.finditer(letters, part.start(), part.end()))
        if not numbers:
            continue
        start, number = numbers[0].start(), numbers[0][0]
        joined = re.sub(r"[^0-9.,:]", "", letters[start : numbers[-1].end()])[:60] or "fractions side by side"
        is_joined = len(numbers) > 1 or letters[start - 1 : start] == _NUMBERED_SCRIPT
        is_structure = (is_script and len(number) == 1) or (is_inner and number in ("0", "1", "2"))
        if is_joined and any(item[0] == VALUE for item in numbers):
            yield GLUED, row[start][1]
        elif is_joined or not (number in (VALUE, _NUMBERED_CELL) or is_structure):
            yield f"{joined!r} {UNGROUNDED}", row[start][1]


_ANY = f"{VALUE}{REFERENCE}{YEAR}"
_LISTED = rf"(?:[.,:]\s+|[\s;]*;\s+)[{_ANY}]"  # ends a sentence or parts a list, as on paper
_WORDED = (
    r"tables?|tabs?\.?|figures?|figs?\.?|sections?|secs?\.?|equations?|eqs?\.?|appendix|appendices|chapters?|"
    r"pages?|p\.|items?|lines?|footnotes?"
)
# References behind their word and behind each other, and years behind an author or in parentheses: read as such.
_NAMED = re.compile(
    rf"(?:\b(?:{_WORDED})|\u00a7|(?-i:\bSee)|\(see)[\s(]*{REFERENCE}"
    rf"(?:(?:,\s+|\)?,?\s*(?:\b(?:and|or|to|through)\b|[\u2013\u2014&-]+)\s*)\(?{REFERENCE})*|"
    rf"(?:{AUTHOR}|(?-i:\b[A-Z][^\W\d_]+)|\bal\.)(?:['\u2019]s?)?,?\s*{YEAR}(?=\s*(?:\Z|[).,;:\]?!]))|"
    rf"\([^()]{{0,60}}{YEAR}(?=\s*[).,;:\]?!])",
    re.IGNORECASE,
)
_WRONG = {
    "numbers that commands print stand side by side and read as one; put words or a comma and a space "
    "there": re.compile(rf"[{_ANY}](?!{_LISTED})(?=[\s.,:;'`\"eE|\u00b7]*[{_ANY}])"),
    "a minus before a value changes it; \\result and \\derived print the sign that a value has": re.compile(
        rf"(?:^|[^\w)\]}}{HOLE}{VALUE}-])[-\u2212\u2013]+\s*(?={VALUE})|(?<!{VALUE} )\b(?:minus|negative)\s+(?={VALUE})"
    ),
    "letters are directly behind a value and would scale it; put a space before a unit": re.compile(
        rf"{VALUE}(?!(?:x|th|D|B)(?![^\W\d_]))(?=[^\W\d_])"
    ),
    "a value touches digits and reads as one number with them; put words between them": re.compile(
        rf"[0-9][.,]?{VALUE}|{VALUE}[.,]?[0-9]"
    ),
    "a reference without its word reads as a number; write Table, Figure, Section, Equation or page before it, as in "
    "Table~\\ref{tab:caramba-NAME}": re.compile(REFERENCE),
    "the year or number of a cited work reads as a measured one here; write it in parentheses or behind its author's "
    "name, with punctuation after it, or use \\citep or \\citet": re.compile(YEAR),
}


def find_wrong(text: Text, names: Names) -> Iterator[Found]:
    """Yield what is wrong with the numbers of a text: values, references and years that read as another number where
    they are, as two settings with a point between them, and digits and number words that are no name."""
    letters = "".join(letter for letter, _ in text)
    loose = _NAMED.sub(lambda found: re.sub(f"[{REFERENCE}{YEAR}]", HOLE, found[0]), letters)
    for what, pattern in _WRONG.items():
        where = loose if pattern.pattern in (REFERENCE, YEAR) else letters
        yield from ((what, text[found.start()][1]) for found in pattern.finditer(where))
    before = ""
    for found in _WORDS.finditer(letters):
        word = found[0].strip(".,:?!*")
        if any(letter.isnumeric() for letter in word) and not names.knows(word, before):
            yield f"{word!r} {UNGROUNDED}", text[found.start()][1]
        before = word
    yield from ((f"{claim!r} {UNGROUNDED}", text[start][1]) for claim, start in claims(letters))
