"""Numbers as people read them, at the edges of their units."""

from __future__ import annotations

from fractions import Fraction

import pytest

from caramba.config.estimate.units import (
    exact,
    format_bytes,
    format_count,
    format_flops,
    format_ratio,
    short_count,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (768, "768 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (32 * 1024 - 512, "31.5 KiB"),
        (1024**2 - 1, "1 MiB"),
        (5 * 1024**3, "5 GiB"),
        (3 * 1024**6, "3072 PiB"),
    ],
)
def test_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(950, "950"), (999_960, "1M"), (49_152, "49.2K"), (1_235_814_400, "1.24B"), (999, "999"), (1000, "1K")],
)
def test_short_counts(value, text):
    assert short_count(value) == text


def test_counts_keep_their_digits():
    assert format_count(1_235_814_400) == "1,235,814,400 (1.24B)"
    assert format_count(9_999) == "9,999"


def test_flops_and_ratios():
    assert format_flops(2.471e9) == "2.47 GFLOP"
    assert format_ratio(Fraction(16, 3)) == "5.33x"


def test_exact_numbers():
    assert exact(Fraction(632)) == 632
    assert isinstance(exact(Fraction(632)), int)
    assert exact(Fraction(9, 2)) == 4.5
