"""Prompts in any form that a caller has them in, as checked rows of token ids, and which of them run together."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from caramba.data import Tokenizer
from caramba.errors import ConfigError

Prompt = str | Sequence[int]


def encode_prompts(
    prompts: Sequence[Prompt] | Tensor, tokenizer: Tokenizer | None, mask: Tensor | None = None
) -> list[list[int]]:
    """Return one list of ids per prompt: texts (with the start mark where the model wants one), lists of ids, or a
    tensor [B, T] int64, of which `mask` [B, T] separates tokens from padding, on the left or right.

    Raises:
        ConfigError: an empty prompt, a text without a tokenizer, a mask with a gap or of another shape.
    """
    if isinstance(prompts, Tensor):
        rows = _unpadded(prompts, mask)
    elif isinstance(prompts, str) or mask is not None:
        raise ConfigError(
            "generate: expected a list of prompts, or a tensor [B, T] with a mask; "
            f"got {type(prompts).__name__}{' and a mask' if mask is not None else ''}"
        )
    else:
        rows = [_encode(index, prompt, tokenizer) for index, prompt in enumerate(prompts)]
    for index, row in enumerate(rows):
        if not row:
            raise ConfigError(f"generate: prompt {index} is empty; give at least one token")
    if not rows:
        raise ConfigError("generate: got no prompts, expected at least one")
    return rows


def refuse_prompts(rows: Sequence[Sequence[int]], *, vocab_size: int, max_new_tokens: int, limit: int | None) -> None:
    """Check rows against the model.

    Raises:
        ConfigError: a token outside the vocabulary, or more tokens than fit.
    """
    for index, row in enumerate(rows):
        wrong = next((token for token in row if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"generate: prompt {index} has token {wrong}, the model's vocabulary is 0 to {vocab_size - 1}; "
                "encode it with the tokenizer that the model was trained with"
            )
        if limit is not None and len(row) + max_new_tokens > limit:
            room = limit - len(row)
            fix = f"lower max_new_tokens to {room} or less" if room > 0 else "shorten the prompt"
            raise ConfigError(
                f"generate: prompt {index} of {len(row)} tokens and max_new_tokens={max_new_tokens} exceed the {limit} "
                f"positions of the model's context (max_seq_len); {fix}"
            )


def group_by_length(lengths: Sequence[int], within: int) -> Iterator[list[int]]:
    """Yield the rows that run together: from the shortest up, those at most `within` tokens longer than the first."""
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    while order:
        most = lengths[order[0]] + within
        group = [row for row in order if lengths[row] <= most]
        yield group
        order = order[len(group) :]


def refuse_broken(text: str, where: str) -> None:
    """Refuse text that came from bytes that are no UTF-8: Python keeps those as lone surrogates, no tokenizer does.

    Raises:
        ConfigError: such a text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: character {error.start} is {text[error.start]!r}, no text; give valid UTF-8"
        ) from None


def _encode(index: int, prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise ConfigError("generate: a prompt is text and there is no tokenizer; give token ids or a tokenizer")
    refuse_broken(prompt, f"generate: prompt {index}")
    ids = tokenizer.encode(prompt)
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids


def _unpadded(tokens: Tensor, mask: Tensor | None) -> list[list[int]]:
    if tokens.dim() != 2 or tokens.is_floating_point() or (mask is not None and mask.shape != tokens.shape):
        raise ConfigError(
            f"generate: got tokens {tokens.dtype} {tuple(tokens.shape)}"
            f"{'' if mask is None else f' and a mask {tuple(mask.shape)}'}; expected integers [B, T] and a mask alike"
        )
    if mask is None:
        return tokens.tolist()
    rows = []
    for index, (ids, kept) in enumerate(zip(tokens.tolist(), mask.bool().tolist(), strict=True)):
        n, first = sum(kept), kept.index(True) if any(kept) else 0
        if not all(kept[first : first + n]):
            raise ConfigError(f"generate: the mask of row {index} has a gap; put padding on one side")
        rows.append(ids[first : first + n])
    return rows
