"""Finds digits and number words that no command of the paper prints, and values that would read as another number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from caramba.paper import vocabulary as words
from caramba.paper.latex import Text

Found = tuple[str, int]
"""A number or what is wrong, and its line."""

# Number formats, norms, ranks and devices, whose digits count nothing in the paper.
_NAMES = (
    "fp4 fp8 fp16 fp32 fp64 bf16 tf32 int4 int8 nf4 q4_0 q8_0 float8 float16 float32 float64 bfloat16 "
    "l1 l2 top-1 top-5 f1 1d 2d 3d 1-d 2-d 3-d 4-bit 8-bit 16-bit 32-bit 64-bit utf-8 "
    "a100 h100 h200 b200 gpt-2 gpt-3 gpt-4 t5"
)
KNOWN_NAMES = frozenset(_NAMES.split())
_WORDS = re.compile(rf"[^\s()\[\]{{}};\"'/\u2013\u2014{words.HOLE}]+")
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


_UNPRINTED = frozenset((words.FORMULA, words.DISPLAY, words.FORMULA_END, words.EMPTY))
_HOLES = frozenset((words.SCRIPT, words.SCRIPT_END, words.CELL, words.CELL_END, words.LETTER, *words.DIGITS))


def as_prose(text: Text) -> Text:
    """Return a paragraph with holes in place of what formulas print besides letters and signs."""
    return [
        (words.HOLE if item[0] in _HOLES else item[0], item[1]) for item in text if item[0] not in _UNPRINTED
    ]


def in_prose(text: Text, names: Names) -> Iterator[Found]:
    """Yield the numbers and number words of a paragraph (from `as_prose`) that are no name."""
    letters = "".join(letter for letter, _ in text)
    before = ""
    for found in _WORDS.finditer(letters):
        word = found[0].strip(".,:?!*")
        if any(letter.isnumeric() for letter in word) and not names.knows(word, before):
            yield word, text[found.start()][1]
        before = word
    for claim, start in claims(letters):
        yield claim, text[start][1]


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
            yield " ".join(found[0].replace(words.HOLE, " ").split()), found.start()


GLUED = (
    "a value that a command prints and another number stand side by side and read as one; put an operator or words "
    "between them"
)
BASELESS = (
    "a sub- or superscript needs a letter or a bracket before it; digits, values and empty groups are no base"
)
_FORMULA = re.compile(f"[{words.FORMULA}{words.DISPLAY}]([^{words.FORMULA_END}]*)")
_OPEN, _CLOSE = words.SCRIPT + words.CELL, words.SCRIPT_END + words.CELL_END
_INNERMOST = re.compile(f"[{_OPEN}]([^{_OPEN}{_CLOSE}]*)[{_CLOSE}]")
_NUMBERED_SCRIPT, _OTHER_SCRIPT, _NUMBERED_CELL = "\ue019", "\ue01b", "\ue01c"
_NUMBER = re.compile(f"[0-9]+|{words.VALUE}|{_NUMBERED_CELL}")
_PARTS = re.compile(r"[^=+*/<>\u00d7\n-]+")  # between operators
_HAS_LETTER = re.compile(rf"[^\W\d]|{words.LETTER}")
_PLAIN_DIGITS = str.maketrans(words.DIGITS, "0123456789")
# A script, the letter, script or closed bracket before it that is its base, and the empty group that it may hold.
_SCRIPTED = re.compile(
    rf"([^\W\d_]|[{words.LETTER}{words.SCRIPT_END}]|[^\s(\[{{]\s*[)\]}}|])?{words.SCRIPT}({words.EMPTY})?"
)


def in_formulas(text: Text) -> Iterator[tuple[str, int, bool]]:
    """Yield what is wrong with the numbers of formulas, and whether it is a number itself.

    Numbers without an operator between them are read together, and scripts need a base. A number alone is structure as
    an index or exponent of one digit, and as 0, 1 or 2 in a displayed formula, a fraction or a root.
    """
    letters = "".join(letter for letter, _ in text).translate(_PLAIN_DIGITS)
    for found in _FORMULA.finditer(letters):
        inside, lines = found[1], [line for _, line in text[found.start(1) : found.end(1)]]
        for script in _SCRIPTED.finditer(inside):
            if script[1] is None or script[2] is not None:
                yield BASELESS, lines[script.start()], False
        while part := _INNERMOST.search(inside):
            start, row, is_script = part.start(), part[1], part[0][0] == words.SCRIPT
            yield from _in_row(row, lines[start:], is_script=is_script, is_inner=not is_script)
            number = _NUMBER.search(row)
            if is_script:
                mark = _NUMBERED_SCRIPT if number and len(row) == 1 else _OTHER_SCRIPT
            elif number:
                mark = words.VALUE if words.VALUE in row else _NUMBERED_CELL
            else:
                mark = words.LETTER if _HAS_LETTER.search(row) else words.EMPTY
            inside = inside[:start] + mark + inside[part.end() :]
            del lines[start + 1 : part.end()]
        yield from _in_row(inside, lines, is_script=False, is_inner=letters[found.start()] == words.DISPLAY)


def _in_row(
    row: str, lines: list[int], *, is_script: bool, is_inner: bool
) -> Iterator[tuple[str, int, bool]]:
    for part in _PARTS.finditer(row):
        runs: list[list[re.Match[str]]] = []
        for number in _NUMBER.finditer(row, part.start(), part.end()):
            gap = row[runs[-1][-1].end() : number.start()] if runs else ""
            if runs and not (_HAS_LETTER.search(gap) and re.search("[,;:|]", gap)):
                runs[-1].append(number)
            else:
                runs.append([number])
        for run in runs:
            start, number = run[0].start(), run[0][0]
            joined = re.sub(r"[^0-9.,:]", "", row[start : run[-1].end()])
            is_structure = (is_script and len(number) == 1) or (is_inner and number in ("0", "1", "2"))
            if len(run) > 1 or row[start - 1 : start] == _NUMBERED_SCRIPT:
                has_value = any(item[0] == words.VALUE for item in run)
                text = GLUED if has_value else joined[:60] or "fractions side by side"
                yield text, lines[start], not has_value
            elif number not in (words.VALUE, _NUMBERED_CELL) and not is_structure:
                yield joined, lines[start], True


_V = words.VALUE
_ANY = f"{_V}{words.REFERENCE}{words.YEAR}"
_MEETING = re.compile(rf"[{_ANY}](?=(?P<joint>[\s.,:;'`\"eE|\u00b7]*)[{_ANY}])")
_LISTED = re.compile(r"[.,:]\s+|[\s;]*;\s+")  # ends a sentence or parts a list, as on paper
_PATTERNS = {
    "a minus before a value changes it; \\result and \\derived print the sign that a value has": re.compile(
        rf"(?:^|[^\w)\]}}\ufffc{_V}-])[-\u2212\u2013]+\s*(?={_V})|(?<!{_V} )\b(?:minus|negative)\s+(?={_V})"
    ),
    "letters are directly behind a value and would scale it; put a space before a unit": re.compile(
        rf"{_V}(?!(?:x|th|D|B)(?![^\W\d_]))(?=[^\W\d_])"
    ),
    "a value touches digits and reads as one number with them; put words between them": re.compile(
        rf"[0-9][.,]?{_V}|{_V}[.,]?[0-9]"
    ),
}
_NUMBERED = re.compile(
    r"(?:\b(?:tables?|tabs?\.?|figures?|figs?\.?|sections?|secs?\.?|equations?|eqs?\.?|appendix|appendices|chapters?|"
    rf"pages?|p\.|items?|lines?|footnotes?)|\u00a7|(?-i:\bSee)|\(see)[\s(]*$|"
    rf"{words.REFERENCE}(?:,\s+|\)?,?\s*(?:\b(?:and|or|to|through)\b|[\u2013\u2014&-]+)\s*)\(?$",
    re.IGNORECASE,
)
_AUTHORED = re.compile(rf"(?:{words.AUTHOR}|\b[A-Z][^\W\d_]+|\bal\.)(?:['\u2019]s?)?,?\s*$")
_BEHIND_YEAR = re.compile(r"\s*(?:$|[).,;:\]?!])")
_NEAR = 60  # characters before a mark that are looked at

VALUES_MEET = (
    "numbers that commands print stand side by side and read as one; put words or a comma and a space there"
)
UNNAMED = (
    "a reference without its word reads as a number; write Table, Figure, Section, Equation or page before it, as in "
    "Table~\\ref{tab:caramba-NAME}"
)
YEAR_LOOSE = (
    "the year or number of a cited work reads as a measured one here; write it in parentheses or behind its author's "
    "name, with punctuation after it, or use \\citep or \\citet"
)


def adjacent(text: Text) -> Iterator[Found]:
    """Yield what is wrong with the places of values, references and years: two settings with a point between them are
    3.3 on paper."""
    letters = "".join(letter for letter, _ in text)
    for what, pattern in _PATTERNS.items():
        yield from ((what, text[found.start()][1]) for found in pattern.finditer(letters))
    for found in _MEETING.finditer(letters):
        if not _LISTED.fullmatch(found["joint"]):
            yield VALUES_MEET, text[found.start()][1]
    for at, letter in enumerate(letters):
        before = letters[max(0, at - _NEAR) : at] if letter in (words.REFERENCE, words.YEAR) else ""
        if letter == words.REFERENCE and not _NUMBERED.search(before):
            yield UNNAMED, text[at][1]
        is_named = _AUTHORED.search(before) or before.rfind("(") > before.rfind(")")
        if letter == words.YEAR and not (is_named and _BEHIND_YEAR.match(letters, at + 1)):
            yield YEAR_LOOSE, text[at][1]
