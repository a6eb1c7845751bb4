"""Prefix cache: keys and values of earlier texts, for requests with the same first tokens."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from torch import Tensor

MIN_TOKENS = 16
"""Shorter beginnings are run again: a start mark that all share would count as a hit."""

State = Mapping[str, Tensor]


class PrefixCache:
    """What the rows of exact caches hold, by their tokens; the least recently used goes when bytes run out.

    Keys and values of a token depend on the tokens before it alone, so any beginning of a text that is kept serves
    every prompt that begins so.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.nbytes = limit_bytes, 0
        self._states: OrderedDict[tuple[int, ...], State] = OrderedDict()

    def match(self, prompt: Sequence[int]) -> tuple[int, State] | None:
        """Return the length of a prompt's longest cached prefix and its cache state; None if too short.

        The prompt's last token is never among them: the logits after it are not kept.
        """
        asked = tuple(prompt[:-1])
        best = max(self._states, key=lambda kept: common(kept, asked), default=())
        n_tokens = common(best, asked)
        if n_tokens < MIN_TOKENS:
            return None
        self._states.move_to_end(best)
        return n_tokens, cut(self._states[best], n_tokens)

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether all of a text is kept, alone or as the beginning of another."""
        text = tuple(tokens)
        found = next((kept for kept in self._states if kept[: len(text)] == text), None)
        if found is not None:
            self._states.move_to_end(found)
        return found is not None

    def put(self, tokens: Sequence[int], state: State) -> None:
        """Store a row's cache after these tokens, in place of its own prefixes; too large a one is not stored."""
        text = tuple(tokens)
        size = nbytes(state)
        if size > self.limit_bytes:
            return
        for kept in self._replaced(text):
            self.nbytes -= nbytes(self._states.pop(kept))
        while self.nbytes + size > self.limit_bytes:
            self.nbytes -= nbytes(self._states.popitem(last=False)[1])
        self._states[text] = state
        self.nbytes += size

    def _replaced(self, text: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [kept for kept in self._states if text[: len(kept)] == kept]


class SnapshotCache(PrefixCache):
    """States after whole texts, for caches such as memory slots, of which no prefix can be cut.

    A prompt continues from the longest kept text that it begins with; a text does not replace its own prefixes.
    """

    def match(self, prompt: Sequence[int]) -> tuple[int, State] | None:
        asked = tuple(prompt[:-1])
        fitting = (kept for kept in self._states if asked[: len(kept)] == kept)
        best = max(fitting, key=len, default=None)
        if best is None:
            return None
        self._states.move_to_end(best)
        return len(best), self._states[best]

    def has(self, tokens: Sequence[int]) -> bool:
        text = tuple(tokens)
        if text not in self._states:
            return False
        self._states.move_to_end(text)
        return True

    def _replaced(self, text: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [text] if text in self._states else []


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens two texts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # by halves: comparing slices takes no loop here
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def cut(state: State, n_tokens: int) -> State:
    """Return what a row of an exact cache holds after its first tokens, without a copy."""
    return {name: values[:, :, :n_tokens] for name, values in state.items()}


def nbytes(state: State) -> int:
    """Return the bytes that a state takes."""
    return sum(values.untyped_storage().nbytes() for values in state.values())
