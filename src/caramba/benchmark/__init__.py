"""Benchmarks: named models in, metrics and raw rows out."""

from caramba.benchmark.subject import Subjects
from caramba.benchmark.suite import run_benchmark, run_suite

__all__ = ["Subjects", "run_benchmark", "run_suite"]
