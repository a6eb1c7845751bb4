"""Artifacts: a run's result as JSON, CSV, figures and LaTeX tables, without torch."""

from __future__ import annotations

from caramba.artifacts.key import MetricKey, parse_key
from caramba.artifacts.metrics import collect
from caramba.artifacts.write import write

__all__ = ["MetricKey", "collect", "parse_key", "write"]
