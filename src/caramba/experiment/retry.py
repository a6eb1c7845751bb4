"""Benchmarks of a finished stage that failed: a resume runs them again, on the weights that the stage saved."""

from __future__ import annotations

import dataclasses

from caramba.experiment.session import Session
from caramba.model import load_pretrained
from caramba.result import BenchmarkResult


def retry_failed_benchmarks(session: Session, stage: str) -> None:
    """Run the benchmarks of a stage on record that failed; what was measured stays as it is.

    What they lacked, memory say, may be there now. Nothing is trained, and nothing is loaded where none failed.
    """
    record = session.ledger[stage]
    if all(result.error is None for result in record.benchmarks):
        return
    model = load_pretrained(session.weights_path(stage), device=session.device)[0].eval()
    benchmarks = {bench.id: bench for bench in session.group.benchmarks}

    def retry(result: BenchmarkResult) -> BenchmarkResult:
        if result.error is None:
            return result
        bench, _, row = result.id.rpartition(".")  # rows have no point in their name
        (found,) = session.measure([benchmarks[bench]], {row: model})
        return dataclasses.replace(found, id=result.id)

    session.ledger.replace(
        dataclasses.replace(record, benchmarks=tuple(retry(result) for result in record.benchmarks))
    )
