"""`prompt_lookup_step`: its contract and its reference, against the same written out row by row; its kernel is tested in
`test_prompt_lookup_step_triton.py`."""

from __future__ import annotations

import pytest
import torch

from caramba.errors import ConfigError
from caramba.infer.drafting import LookupDrafter
from caramba.ops.prompt_lookup_step import prompt_lookup_step
from tests.ops.prompt_lookup_cases import K, LookupCase, lookup_case


def by_hand(case: LookupCase) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Each row's text after the round, how many tokens it kept, and the next drafts."""
    texts, kept, found = [], [], []
    width = case.drawn.shape[1]
    for row, (ids, held, state, drawn, is_live) in enumerate(
        zip(*(x.tolist() for x in (case.ids, case.held, case.state, case.drawn, case.live)), strict=True)
    ):
        text = ids[: held - width + 1]
        drafts = state[2 : 2 + min(case.most, width - 1)] if state[0] else []
        own = []
        for draft, token in zip(drafts, drawn, strict=False):
            own.append(token)
            if draft != token:
                break
        else:
            if case.extra or not drafts:
                own.append(drawn[len(drafts)])
        own = own if is_live else []
        texts.append([*text, *own])
        kept.append(len(own))
        drafter = LookupDrafter(case.max_ngram)
        found.append(drafter.propose([texts[row]], [K])[0][0])
    return texts, kept, found


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_it_keeps_and_looks_up_what_a_loop_does(seed: int, width: int) -> None:
    case = lookup_case(seed, [1, 9, 30, 2, 17, 5], 48, width)
    texts, kept, found = by_hand(case)
    assert prompt_lookup_step(*case.arguments).tolist() == kept
    assert case.held.tolist() == [len(text) - 1 for text in texts]
    for ids, text, state, drafts in zip(case.ids.tolist(), texts, case.state.tolist(), found, strict=True):
        assert ids[: len(text)] == text
        assert (state[1], state[2:]) == (text[-1], drafts or [0] * K)
        size = state[0]
        assert (size > 0) == bool(drafts)
        assert size <= case.max_ngram
        if size:  # a run of so many tokens, and no longer one, stood before
            ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
            assert text[ends[-1]] == drafts[0]
            longer = range(size + 1, min(case.max_ngram, len(text)) + 1)
            assert not any(text[end - n : end] == text[-n:] for n in longer for end in range(n, len(text)))


def test_what_it_does_not_keep_stays_as_it_was() -> None:
    case = lookup_case(3, [10, 10, 10], 20, 8)
    before = case.ids.clone()
    prompt_lookup_step(*case.arguments)
    for row, held in enumerate(case.held.tolist()):
        assert torch.equal(case.ids[row, held + 1 :], before[row, held + 1 :])
    assert case.held[1] == 9  # not live
    torch.library.opcheck(torch.ops.caramba.prompt_lookup_step.default, lookup_case(3, [10, 3], 20, 4).arguments)


def test_misuse_is_named() -> None:
    case = lookup_case(0, [4, 5], 20, 2)
    with pytest.raises(
        ConfigError, match=r"prompt_lookup_step: lengths: got torch.int64 .* expected contiguous torch.int32"
    ):
        prompt_lookup_step(case.ids, case.held.long(), *case.arguments[2:])
    with pytest.raises(
        ConfigError,
        match=r"prompt_lookup_step: sampled: got torch.int64 of shape \(2, 9\) on cpu, expected .*\(2, 8\)",
    ):
        prompt_lookup_step(*case.arguments[:3], torch.zeros(2, 9, dtype=torch.int64), *case.arguments[4:])
    with pytest.raises(ConfigError, match=r"prompt_lookup_step: ids: .* not contiguous"):
        prompt_lookup_step(case.ids.T.contiguous().T, *case.arguments[1:])
    with pytest.raises(ConfigError, match=r"most=7 and max_ngram=0, expected >= 0 and >= 1"):
        prompt_lookup_step(*case.arguments[:5], 7, 0)
