"""Rows of a batch at positions of their own: each reads and writes as it does alone, whatever fills up the others."""

from __future__ import annotations

import pytest
import torch
from model_specs import VOCAB, transformer

from caramba.cache import DeviceContext
from caramba.config.kvcache import KVCacheKind
from caramba.errors import CacheFull, ConfigError
from caramba.model import build_model

LENGTHS = [9, 2, 5]
TOKENS = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["gqa_scaled", "window", "decoupled_gate", "latent_gate", "no_rope"])
def test_every_row_is_that_row_alone_after_any_rollback(name: str) -> None:
    model = build_model(transformer(name), seed=0).eval()
    with torch.inference_mode():
        whole = model(TOKENS)
        ctx = model.new_context(3, 20, static=True)
        model(torch.where(torch.arange(9) < torch.tensor(LENGTHS)[:, None], TOKENS[:, :9], 0), ctx)
        rows, held = DeviceContext.ragged(ctx, LENGTHS), list(LENGTHS)
        for width, kept in ((3, (3, 0, 1)), (5, (1, 5, 2)), (1, (0, 1, 1)), (3, (3, 3, 3))):
            rows.width = width
            fed = torch.stack([TOKENS[b, n : n + width] for b, n in enumerate(held)])
            found = model(fed, rows)
            expected = torch.stack([whole[b, n : n + width] for b, n in enumerate(held)])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            held = [n + k for n, k in zip(held, kept, strict=True)]
            rows.rewind(held)
    assert held == rows.lengths == [16, 11, 12]
    assert rows.device_lengths.tolist() == held


def test_rows_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    model = build_model(transformer("standard"), seed=0).eval()
    rows = DeviceContext.ragged(model.new_context(2, 6, static=True), [5, 1])
    rows.width = 2
    with torch.inference_mode(), pytest.raises(CacheFull, match=r"7 tokens do not fit max_tokens=6"):
        model(TOKENS[:2, :2], rows)
    assert rows.device_lengths.tolist() == rows.lengths == [5, 1]
    with pytest.raises(ConfigError, match=r"rows of lengths \[7, 1\], expected 2 from 0 to 6"):
        rows.rewind([7, 1])
    rows.rewind([0, 0])
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"got 3 tokens per sequence, expected 2"):
        model(TOKENS[:2, :3], rows)
    with pytest.raises(ConfigError, match=r"decode step on the device: the cache is quantised"):
        DeviceContext.ragged(model.new_context(2, 6, KVCacheKind.Q8_0, static=True), [0, 0])
