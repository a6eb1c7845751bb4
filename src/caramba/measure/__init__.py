"""Measurements that several stages share."""

from caramba.measure.agreement import Agreement, agreement, cached_hidden
from caramba.measure.allocation import AllocationMeter
from caramba.measure.nll import (
    WindowedNLL,
    Windows,
    batches,
    documents_of,
    samples_of,
    spread_windows,
    windowed_nll,
)
from caramba.measure.storage import model_bytes, plain_tensors

__all__ = [
    "Agreement",
    "AllocationMeter",
    "WindowedNLL",
    "Windows",
    "agreement",
    "batches",
    "cached_hidden",
    "documents_of",
    "model_bytes",
    "plain_tensors",
    "samples_of",
    "spread_windows",
    "windowed_nll",
]
