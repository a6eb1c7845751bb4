"""The training ladder's schema: what each row's phase is, what leaving one out takes away, and what is no ladder."""

from __future__ import annotations

import pytest

from caramba.config.benchmark import RUNGS, LadderConfig, fastest, row_keys, top_of, without
from caramba.config.train import PhaseConfig

ALL = [name for name in RUNGS if name != "largest_batch"]


@pytest.mark.parametrize("count", range(1, len(ALL) + 1))
def test_every_row_is_a_phase_and_so_is_the_top_without_any(count: int) -> None:
    rows = ALL[:count]
    phase = PhaseConfig.model_validate({"phase": "pretrain", "steps": 1, **row_keys(rows)})
    assert phase.cross_entropy == ("chunked" if "fused_ce" in rows else "dense")
    assert phase.has_16_bit_weights == ("bf16_weights" in rows)
    for name in rows[1:]:
        left = PhaseConfig.model_validate({"phase": "pretrain", "steps": 1, **without(rows, name)})
        keys = RUNGS[name].keys if RUNGS[name].undone else {}
        assert all(getattr(left, key) != value for key, value in keys.items() if key != "dtype"), name
    if count > 2:
        left = PhaseConfig.model_validate({"phase": "pretrain", "steps": 1, **without(rows, "bf16")})
        assert (left.dtype, left.float8) == ("float32", "none")


def test_bfloat16_weights_are_rounded_at_random_with_fused_adamw_or_without() -> None:
    for keys in (row_keys(ALL), without(ALL, "fused_adamw"), row_keys(["baseline", "bf16_weights"])):
        phase = PhaseConfig.model_validate({"phase": "pretrain", "steps": 1, **keys})
        assert (phase.stochastic_rounding, phase.master_weights) == (True, False)
    assert without(ALL, "bf16_weights")["stochastic_rounding"] is False
    assert "stochastic_rounding" not in without(["baseline", "fused_adamw"], "fused_adamw")


def test_rows_keep_the_baseline_s_keys_where_it_could_not_be_measured() -> None:
    assert row_keys(["tf32"]) == row_keys(["baseline", "tf32"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rows": ["bf16", "flash"]}, "is no ladder: .* begin with baseline"),
        ({"rows": ["baseline", "flash", "bf16"]}, "in the order baseline, tf32, bf16"),
        ({"rows": ["baseline", "baseline"]}, "name rows once"),
        ({"rows": ["baseline", "fp8", "bf16_weights", "bf16_weights"]}, "name rows once"),
        ({"loss_steps": 60}, "loss_steps=60 are fewer than warmup_steps=20 and timed_steps=50"),
        ({"largest": False}, "rows name largest_batch, which largest=false does not look for"),
    ],
)
def test_what_is_no_ladder_is_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LadderConfig.model_validate({"type": "ladder", **settings})


def test_rows_in_the_former_order_are_put_in_that_of_the_ladder() -> None:
    former = ["baseline", "fp8", "bf16_weights", "full"]
    rows = LadderConfig.model_validate({"type": "ladder", "rows": former}).rows
    assert rows == ("baseline", "bf16_weights", "fp8", "full")
    assert LadderConfig.model_validate({"type": "ladder", "rows": list(rows)}).rows == rows
    with pytest.raises(ValueError, match="is no ladder"):
        LadderConfig.model_validate({"type": "ladder", "rows": ["baseline", "full", "fp8", "bf16_weights"]})


def _row(name: str, tok_s: float, peak_bytes: int, **more: float) -> dict[str, object]:
    return {"row": name, "tok_s": tok_s, "peak_bytes": peak_bytes, **more}


def test_the_top_is_the_fastest_row_that_keeps_activations_and_of_equally_fast_ones_the_smaller() -> None:
    rows = [
        _row("baseline", 10.0, 20),
        {"row": "tf32", "skipped": "no"},
        _row("fused_ce", 100.0, 12),
        _row("bf16_weights", 98.5, 11),
        _row("fp8", 97.9, 5),
        _row("full", 120.0, 4),
        _row("largest_batch", 150.0, 90),
        _row("twin_1", 130.0, 11),
        _row("without_fp8", 140.0, 11),
    ]
    top = top_of(rows, 0.01)
    assert top is not None
    assert top["row"] == "bf16_weights"  # 1.5% slower than the fastest; fp8 is 2.1%
    assert top_of(rows[1:2], 0.01) is None
    paid = [row | {"val_loss_delta": delta} for row, delta in zip(rows[2:5], (0.004, -0.02, 0.011), strict=True)]
    for tolerance, name in ((0.01, "fused_ce"), (0.02, "bf16_weights"), (0.0, None)):
        top = top_of(paid, tolerance)
        assert (top and top["row"]) == name
    largest = [
        _row("fp8", 1.0, 1, largest_tok_s=199.0, largest_peak_bytes=100),
        _row("full", 1.0, 1, largest_tok_s=201.0, largest_peak_bytes=85),
        _row("baseline", 9.0, 9),
    ]
    best = fastest(largest, "largest_tok_s", "largest_peak_bytes")
    assert best is not None
    assert best["row"] == "full"
