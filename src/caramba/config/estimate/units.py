"""Numbers as people read them: bytes in powers of 1024, counts and FLOPs in powers of 1000, ratios."""

from __future__ import annotations

from fractions import Fraction

Number = int | float | Fraction

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", "K", "M", "B", "T", "Q")
_FLOPS = ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP")


def format_bytes(value: Number) -> str:
    """Return bytes such as `768 B`, `31.5 KiB` or `4.6 GiB`."""
    scaled, unit = _scaled(float(value), 1024, _BYTES)
    return f"{_short(scaled)} {unit}"


def format_count(value: int) -> str:
    """Return a count with its digits and, from ten thousand on, its size: `1,235,814,400 (1.24B)`."""
    return f"{value:,}" if abs(value) < 10_000 else f"{value:,} ({short_count(value)})"


def short_count(value: Number) -> str:
    """Return a count of about three digits: `950`, `49.2K`, `1.24B`."""
    scaled, unit = _scaled(float(value), 1000, _COUNTS)
    return f"{_short(scaled)}{unit}"


def format_flops(value: Number) -> str:
    """Return FLOPs such as `2.47 GFLOP`."""
    scaled, unit = _scaled(float(value), 1000, _FLOPS)
    return f"{_short(scaled)} {unit}"


def format_ratio(value: Number) -> str:
    """Return a ratio such as `2.67x`."""
    return f"{float(value):.3g}x"


def exact(value: Fraction) -> int | float:
    """Return a fraction as the JSON number that it is: an int where it is whole."""
    return value.numerator if value.denominator == 1 else float(value)


def _scaled(value: float, step: int, units: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    # 999.95 would print as "1000" of the smaller unit, so the step up happens where rounding would reach it.
    while abs(value) >= step * (1 - 5e-4) and index < len(units) - 1:
        value /= step
        index += 1
    return value, units[index]


def _short(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
