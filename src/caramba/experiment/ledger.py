"""What each finished stage of a run returned, kept in `stages/` so that a resumed run repeats none of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from caramba.errors import CheckpointError
from caramba.result import BenchmarkResult, PhaseResult, TransplantReport, Verdict, to_plain
from caramba.runs.files import check_file, write_json


@dataclass(frozen=True)
class StageRecord:
    """Results of one stage: its phase, its verdicts, and the rows that it added to the tables."""

    phase: PhaseResult
    verdicts: tuple[Verdict, ...] = ()
    benchmarks: tuple[BenchmarkResult, ...] = ()
    transplant: TransplantReport | None = None


class StageLedger:
    """Stage records of one run by stage id, in the order in which they finished."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "stages"
        adapter = TypeAdapter(StageRecord)
        files = sorted(self.folder.glob("*.json"), key=_number) if self.folder.is_dir() else []
        self._records = {file.stem.split("-", 1)[1]: _read(file, adapter) for file in files}

    def __contains__(self, stage: str) -> bool:
        return stage in self._records

    def __getitem__(self, stage: str) -> StageRecord:
        return self._records[stage]

    def records(self) -> tuple[StageRecord, ...]:
        return tuple(self._records.values())

    def add(self, record: StageRecord) -> None:
        """Keep a finished stage. Its weights are on disk by now: the record marks it as done."""
        stage = record.phase.id
        number = max(map(_number, self.folder.glob("*.json")), default=-1) + 1
        write_json(self.folder / f"{number:02d}-{stage}.json", to_plain(record))
        self._records[stage] = record

    def replace(self, record: StageRecord) -> None:
        """Keep what a stage that is on record has returned since, at its place among the others."""
        stage = record.phase.id
        write_json(self._file(stage), to_plain(record))
        self._records[stage] = record

    def put(self, record: StageRecord) -> None:
        """Keep a stage, at its place among the others where it is on record already."""
        (self.replace if record.phase.id in self else self.add)(record)

    def remove(self, stage: str) -> None:
        """Strike a stage from the record: it is to be done again."""
        self._file(stage).unlink()
        del self._records[stage]

    def is_measured(self, stage: str) -> bool:
        """Whether a stage is on record, and no benchmark of it failed."""
        return stage in self and all(result.error is None for result in self[stage].benchmarks)

    def _file(self, stage: str) -> Path:
        return next(file for file in self.folder.glob("*.json") if file.stem.split("-", 1)[1] == stage)


def _read(file: Path, adapter: TypeAdapter[StageRecord]) -> StageRecord:
    check_file(file)
    try:
        return adapter.validate_python(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: cannot be read as the record of a stage ({type(error).__name__}); restore it, or delete the run"
        ) from error


def _number(file: Path) -> int:
    return int(file.stem.split("-", 1)[0])
