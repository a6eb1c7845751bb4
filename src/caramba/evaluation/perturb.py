"""Changes of a prompt that leave its answer as it is: typing errors, capitals, spaces, a sentence that does not matter.

A change follows from the prompt alone, so that every model is asked the same text.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable

from caramba.config.suite_file import PerturbationName

TYPO_RATE = 0.1
DISTRACTOR = "The library on the corner opens at nine on weekdays. "


def perturb(name: PerturbationName, prompt: str) -> str:
    """Return a prompt under a change of the given name."""
    seed = hashlib.sha256(f"{name}\0{prompt}".encode()).digest()
    return _CHANGES[name](prompt, random.Random(seed))


def _swap_letters(prompt: str, generator: random.Random) -> str:
    """Swap two inner letters of every tenth word of four letters or more, of at least one word."""
    words = [found for found in re.finditer(r"[^\W\d_]{4,}", prompt) if len(set(found[0][1:-1])) > 1]
    if not words:
        return prompt
    chosen = generator.sample(words, max(1, round(TYPO_RATE * len(words))))
    letters = list(prompt)
    for word in chosen:
        places = [at for at in range(word.start() + 1, word.end() - 2) if letters[at] != letters[at + 1]]
        if places:
            at = generator.choice(places)
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)


def _swap_case(prompt: str, generator: random.Random) -> str:
    """Write a third of the words in capitals."""
    return re.sub(
        r"[^\W\d_]+", lambda word: word[0].upper() if generator.random() < 1 / 3 else word[0], prompt
    )


def _double_spaces(prompt: str, generator: random.Random) -> str:
    """Double a third of the spaces between words."""
    return re.sub(r"(?<=\S) (?=\S)", lambda _: "  " if generator.random() < 1 / 3 else " ", prompt)


def _add_sentence(prompt: str, generator: random.Random) -> str:
    return DISTRACTOR + prompt


_CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    "typos": _swap_letters,
    "case": _swap_case,
    "spaces": _double_spaces,
    "distractor": _add_sentence,
}
