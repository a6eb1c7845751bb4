"""Artifacts: a run's result as JSON, CSV, figures and LaTeX tables, without torch."""

from __future__ import annotations

from caramba.artifact.key import MetricKey, parse_key
from caramba.artifact.metrics import collect
from caramba.artifact.write import write

__all__ = ["MetricKey", "collect", "parse_key", "write"]
