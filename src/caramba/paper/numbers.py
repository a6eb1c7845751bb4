"""Finds digits and number words that no command of the paper prints, and values that would read as another number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

Text = list[tuple[str, int]]
"""What a section prints: characters and the marks below, each with its line."""
Found = tuple[str, int]
"""What is wrong, and its line."""

# Marks, which no section may hold. What is printed by code: a number, or the name of an author before a year, ...
VALUE, REFERENCE, YEAR, AUTHOR = "\ue000", "\ue001", "\ue002", "\ue003"
# ... what is no number: a letter of a formula, anything else, and a group that prints nothing, ...
LETTER, HOLE, EMPTY = "\ue004", "\ue005", "\ue006"
# ... and where formulas, their scripts and their cells (of fractions, roots and matrices) begin and end.
FORMULA, DISPLAY, FORMULA_END = "\ue010", "\ue011", "\ue012"
SCRIPT, SCRIPT_END, CELLS, CELLS_END = "\ue013", "\ue014", "\ue015", "\ue016"
_INDEXED = "\ue017"  # a script that was an index
BREAK = " ; "  # between paragraphs, cells and items, which are separate on the page
_DIGITS, _OF_FORMULAS = "0123456789", "".join(map(chr, range(0xE020, 0xE02A)))
TO_FORMULA, _FROM_FORMULA = str.maketrans(_DIGITS, _OF_FORMULAS), str.maketrans(_OF_FORMULAS, _DIGITS)
_AS_PROSE = str.maketrans(dict.fromkeys([LETTER, SCRIPT, SCRIPT_END, CELLS, CELLS_END, *_OF_FORMULAS], HOLE))
_NOT_PROSE = (EMPTY, FORMULA, DISPLAY, FORMULA_END)

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
        phrase = f" {before} {_LINKS.sub(' ', word)} "
        return len(before) > 2 and before.isalpha() and any(phrase in text for text in self._phrases)

    def unknown_words(self, text: str) -> Iterator[tuple[str, int]]:
        """Yield the words with digits that are no names, with their places."""
        before = ""
        for found in _WORDS.finditer(text):
            word = found[0].strip(".,:?!*")
            if any(letter.isnumeric() for letter in word) and not self.knows(word, before):
                yield word, found.start()
            before = word


# Words between which nothing ends: neither a sentence nor a bracket nor a cell.
_GAP = r"[^\w.,;!?()\[\]\u00d7]+"
_END = r"(?=\s*(?:$|[.,;!?)]))"
_LARGE = "five|six|seven|eight|nine|ten|eleven|twelve"
_SMALL = "two|three|four"
_PART = "third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|hundredth|thousandth"
_MEASURE = (
    "times|fold|percent|percentage|points?|nats|bits|bytes|[kmg]i?b|ms|tokens|steps|epochs|hours|minutes|"
    "(?:milli|micro)?seconds|parameters|layers|heads|orders|flops|watts|halves"
)
_NUMBER_WORD = re.compile(
    rf"\b(?:twice|thrice|tens|dozens?|{_LARGE}|(?:{_SMALL}|{_LARGE})fold|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    rf"(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:hundred|thousand|(?:m|b|tr)illion)s?|(?:{_PART})s|halv\w+|"
    r"half(?![\s-]+(?:precision|open|life|width|plane|space)\b)|(?:doubl|tripl|quadrupl|quintupl)(?:e[sd]?|ing)|"
    rf"(?:an?|one){_GAP}(?:{_PART})(?={_END}|{_GAP}(?:of|as|the|less|more|fewer|\w+er)\b)|"
    # "Two models" and "one block" claim nothing; "two percent", "a factor of two" and a cell with "two" do.
    rf"(?:zero|one|{_SMALL})(?={_GAP}(?:{_MEASURE})\b|[^\w.,;!?]*\u00d7|{_GAP}(?:point|in|out{_GAP}of){_GAP}(?:\w+)\b)|"
    rf"(?:of|has|reaches|is|are|by|at){_GAP}(?:zero|{_SMALL})"
    rf"(?:{_END}|(?={_GAP}(?:on|in|out|at|with|while|when|but|than|against|for|from|after|before|versus|is|are)\b))|"
    rf"(?:(?<=;\s)|(?<=^\s))(?:{_SMALL}){_END}"
    # Roman numerals: none of MLP, CV and ML.
    r"|(?-i:(?<!Type )(?<!Part )(?:[XVI]{3,}|[MDCLXVI]{4,}|[XVI]{2}"
    rf"(?=\s+(?:{_MEASURE})\b))))\b",
    re.IGNORECASE,
)


def number_words(text: str) -> Iterator[tuple[str, int]]:
    """Yield the number words that claim something, such as "twice" or "a loss of two", with their places."""
    for found in _NUMBER_WORD.finditer(text):
        yield " ".join(found[0].replace(HOLE, " ").split()), found.start()


GLUED = (
    "a value that a command prints and another number stand side by side and read as one; put an operator or words "
    "between them"
)
BASELESS = "a sub- or superscript needs a letter or a bracket before it; digits, values and empty groups are no base"
_MARKS = f"{SCRIPT}{SCRIPT_END}{CELLS}{CELLS_END}"
_NUMBER = re.compile(f"[0-9]+|{VALUE}")
_BASE = re.compile(rf"(?:[^\W\d_]|[{LETTER}{SCRIPT_END}]|[^\s(\[{{{_MARKS}=]\s*[)\]}}|])\Z")
# A script with one digit is an index or exponent.
_INDEX = re.compile(f"{SCRIPT}[^0-9{VALUE}{_MARKS}]*[0-9][^0-9{VALUE}{_MARKS}]*{SCRIPT_END}")
# An operator, or a comma or bar that follows a letter, separates two numbers.
_OPERANDS = re.compile(rf"(?:(?!(?:[^\W\d_]|{LETTER})[^0-9{VALUE}]*[,;:|])[^=+*/<>\u00d7\n-])+")
_TOUCHED = re.compile(f"[{_INDEXED}{SCRIPT_END}][0-9{VALUE}]|{CELLS_END}.*[0-9{VALUE}]|[0-9{VALUE}]{CELLS}")


def _check_formula(formula: str, *, is_display: bool) -> Iterator[str]:
    """Yield what is wrong with the numbers of a formula: those without an operator between them are read together.

    A number alone is structure as 0, 1 or 2 in a displayed formula, a script, a fraction or a root.
    """
    for script in re.finditer(f"{SCRIPT}({EMPTY}?{SCRIPT_END})?", formula):
        if script[1] or not _BASE.search(formula[: script.start()]):
            yield BASELESS
    flat = _INDEX.sub(_INDEXED, formula)
    for operand in _OPERANDS.finditer(flat):
        numbers = _NUMBER.findall(operand[0])
        is_alone = len(numbers) == 1 and not _TOUCHED.search(operand[0])
        before = flat[: operand.start() + len(operand[0].split(numbers[0])[0])] if numbers else ""
        depth = sum((mark in (SCRIPT, CELLS)) - (mark in (SCRIPT_END, CELLS_END)) for mark in before)
        is_inner = is_display or depth > 0
        if VALUE in numbers and not is_alone:
            yield GLUED
        elif numbers and VALUE not in numbers and not (is_alone and is_inner and numbers[0] in ("0", "1", "2")):
            yield f"{re.sub('[^0-9.,:]', '', operand[0])[:60]!r} {UNGROUNDED}"


_ANY = f"{VALUE}{REFERENCE}{YEAR}"
_LISTED = rf"(?:[.,:]\s+|[\s;]*;\s+)[{_ANY}]"  # ends a sentence or parts a list, as on paper
# References behind their word and behind each other, and years behind an author or at the end of parentheses.
_NAMED = re.compile(
    r"(?:\b(?:tables?|figures?|sections?|equations?|pages?|appendi(?:x|ces)|(?:tab|fig|sec|eq)s?\.?)|\u00a7)"
    rf"[\s(]*{REFERENCE}(?:(?:,\s+|,?\s*(?:\b(?:and|or|to|through)\b|[\u2013\u2014&-]+)\s*){REFERENCE})*|"
    rf"(?:{AUTHOR}|(?-i:\b[A-Z][^\W\d_]+)|\bal\.)(?:['\u2019]s?)?,?\s*{YEAR}(?=\s*(?:\Z|[).,;:\]?!]))|"
    rf"\([^()]{{0,60}}{YEAR}(?=\s*\))",
    re.IGNORECASE,
)
_WRONG = {
    "numbers that commands print stand side by side and read as one; put words or a comma and a space "
    "there": rf"[{_ANY}](?!{_LISTED})(?=[\s.,:;'`\"eE|\u00b7]*[{_ANY}])",
    "a minus before a value changes it; \\result and \\derived print the sign that a value has": (
        rf"(?:^|[^\w)\]}}{HOLE}{VALUE}-])[-\u2212\u2013]+\s*(?={VALUE})|(?<!{VALUE} )\b(?:minus|negative)\s+(?={VALUE})"
    ),
    "letters or digits touch a value and would change it; put a space or words "
    "between": rf"{VALUE}(?!x\b)(?=[^\W_])|[0-9][.,]?{VALUE}|{VALUE}[.,][0-9]",
    "a reference without its word reads as a number; write Table, Figure, Section, Equation or page before it, as in "
    "Table~\\ref{tab:caramba-NAME}": REFERENCE,
    "the year or number of a cited work reads as a measured one here; write it in parentheses or behind its author's "
    "name, with punctuation after it, or use \\citep or \\citet": YEAR,
}


def digits_of_formulas(text: Text) -> str:
    """Return the digits that formulas print."""
    return "".join(letter for letter, _ in text if letter in _OF_FORMULAS).translate(_FROM_FORMULA)


def find_wrong(text: Text, names: Names) -> Iterator[Found]:
    """Yield what is wrong with the numbers of a text: in formulas; values, references and years that read as another
    number where they are, as two settings with a point between them; digits and number words that are no name."""
    whole = "".join(letter for letter, _ in text)
    for found in re.finditer(f"([{FORMULA}{DISPLAY}])([^{FORMULA_END}]*){FORMULA_END}", whole):
        formula, line = found[2].translate(_FROM_FORMULA), text[found.start()][1]
        yield from ((wrong, line) for wrong in _check_formula(formula, is_display=found[1] == DISPLAY))
    lines = [line for letter, line in text if letter not in _NOT_PROSE]
    letters = "".join(letter for letter in whole if letter not in _NOT_PROSE).translate(_AS_PROSE)
    loose = _NAMED.sub(lambda found: re.sub(f"[{REFERENCE}{YEAR}]", HOLE, found[0]), letters)
    for what, pattern in _WRONG.items():
        where = loose if pattern in (REFERENCE, YEAR) else letters
        yield from ((what, lines[found.start()]) for found in re.finditer(pattern, where))
    for word, start in (*names.unknown_words(letters), *number_words(letters)):
        yield f"{word!r} {UNGROUNDED}", lines[start]
