"""Benchmarks of named models, and verification of a student against its teacher."""

from caramba.evaluation.accuracy import check_accuracy as check_accuracy
from caramba.evaluation.subject import Subjects as Subjects
from caramba.evaluation.suite import run_benchmark as run_benchmark
from caramba.evaluation.suite import run_suite as run_suite
from caramba.evaluation.verification import check_other_texts as check_other_texts
from caramba.evaluation.verification import prepare_verification as prepare_verification
from caramba.evaluation.verification import verify as verify
