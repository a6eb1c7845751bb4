"""Benchmarks of named models, and verification of a student against its teacher."""

from caramba.evaluation.accuracy import check_accuracy
from caramba.evaluation.other_text import check_other_texts
from caramba.evaluation.subject import Subjects
from caramba.evaluation.suite import run_benchmark, run_suite
from caramba.evaluation.verification import prepare_verification, verify

__all__ = [
    "Subjects",
    "check_accuracy",
    "check_other_texts",
    "prepare_verification",
    "run_benchmark",
    "run_suite",
    "verify",
]
