"""Measurements that several stages share."""

from caramba.metrics.agreement import Agreement, agreement, cached_hidden
from caramba.metrics.allocation import AllocationMeter
from caramba.metrics.nll import (
    WindowedNLL,
    Windows,
    batches,
    documents_of,
    samples_of,
    spread_windows,
    windowed_nll,
)
from caramba.metrics.storage import model_bytes, plain_tensors

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
