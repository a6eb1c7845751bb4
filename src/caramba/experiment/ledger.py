"""What each finished stage of a run returned, kept in `stages/` so that a resumed run repeats none of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from caramba.result import BenchmarkResult, PhaseResult, TransplantReport, Verdict, to_plain
from caramba.runs.files import write_json


@dataclass(frozen=True)
class StageRecord:
    """Results of one stage: its phase, its verdicts, and the rows that it added to the tables."""

    phase: PhaseResult
    verdicts: tuple[Verdict, ...] = ()
    benchmarks: tuple[BenchmarkResult, ...] = ()
    transplant: TransplantReport | None = None


class Ledger:
    """Stage records of one run by stage id, in the order in which they finished."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "stages"
        adapter = TypeAdapter(StageRecord)
        files = sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []
        self._records = {
            file.stem.split("-", 1)[1]: adapter.validate_python(json.loads(file.read_text()))
            for file in files
        }

    def __contains__(self, stage: str) -> bool:
        return stage in self._records

    def __getitem__(self, stage: str) -> StageRecord:
        return self._records[stage]

    def records(self) -> tuple[StageRecord, ...]:
        return tuple(self._records.values())

    def add(self, record: StageRecord) -> None:
        """Keep a finished stage. Its weights are on disk by now: the record is what says that it is done."""
        stage = record.phase.id
        write_json(self.folder / f"{len(self._records):02d}-{stage}.json", to_plain(record))
        self._records[stage] = record

    def replace(self, record: StageRecord) -> None:
        """Keep what a stage that is on record has returned since, at its place among the others."""
        stage = record.phase.id
        file = next(file for file in self.folder.glob("*.json") if file.stem.split("-", 1)[1] == stage)
        write_json(file, to_plain(record))
        self._records[stage] = record
