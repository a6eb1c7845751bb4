"""`argmax_logprob`: its contract, its reference, and its kernel, on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import pytest
import torch

from caramba.errors import ConfigError
from caramba.ops.sample import argmax_logprob, reference_argmax_logprob


def test_it_is_argmax_and_log_softmax() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    index, logprob = argmax_logprob(logits)
    assert torch.equal(index, logits.argmax(-1))
    wanted = logits.amax(-1) - logits.logsumexp(-1)
    torch.testing.assert_close(logprob, wanted, rtol=1e-12, atol=1e-12)
    torch.library.opcheck(torch.ops.caramba.argmax_logprob.default, (logits.float(),))
    assert torch.equal(reference_argmax_logprob(logits.half())[0], logits.half().argmax(-1))
    with pytest.raises(ConfigError, match=r"argmax_logprob: logits are .*\(3, 0\).*expected floating \[B, V >= 1\]"):
        argmax_logprob(logits[:, :0])
