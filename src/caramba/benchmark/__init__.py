"""Benchmarks: named models in, metrics and raw rows out."""

from caramba.benchmark.accuracy import check_accuracy
from caramba.benchmark.subject import Subjects
from caramba.benchmark.suite import run_benchmark, run_suite

__all__ = ["Subjects", "check_accuracy", "run_benchmark", "run_suite"]
