"""The state of a decode step: what a draw leaves is the same by a kernel and by PyTorch's own calls."""

from __future__ import annotations

import pytest
import torch

from caramba.config.generate import GenerateConfig
from caramba.infer import step as module
from caramba.infer.row import GenerationRow
from caramba.infer.step import StepState

VOCAB = 23


def drawn(config: GenerateConfig, lengths: tuple[int, ...], *, into: bool) -> list[torch.Tensor]:
    """Return what a state holds after more draws than there are new tokens, and what was fed at each."""
    source = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (length,), generator=source).tolist() for length in lengths]
    rows = GenerationRow.of(prompts, config, (), None, None)
    state = StepState.of(rows, config, VOCAB, torch.device("cpu"))
    found = []
    for _ in range(config.max_new_tokens + 2):
        given = torch.full((len(rows),), -1) if into else None
        fed = state.choose(torch.randn(len(rows), VOCAB, generator=source), config, given)
        assert given is None or fed is given
        found.append(fed.clone())
    return [torch.stack(found), state.tokens, state.logprobs, state.step]


@pytest.mark.parametrize("lengths", [(4,), (3, 3), (2, 5)], ids=str)
@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"temperature": 0.7}, {"repetition_penalty": 1.5}], ids=str)
def test_a_kernel_keeps_what_pytorch_keeps(
    values: dict[str, float], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerateConfig.model_validate({"max_new_tokens": 4} | values)
    plain = drawn(config, lengths, into=False)
    kept = []
    monkeypatch.setattr(module, "has_kernel", lambda op, x: op == "store_sample")
    monkeypatch.setattr(module, "store_sample", lambda *given, run=module.store_sample: kept.append(1) or run(*given))
    for into in (False, True):
        for one, other in zip(plain, drawn(config, lengths, into=into), strict=True):
            assert torch.equal(one, other)
    is_level = len(set(lengths)) == 1
    assert len(kept) == (2 * 6 if is_level and "repetition_penalty" not in values else 0)
