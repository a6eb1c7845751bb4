"""What a phase leaves to measurement, decided by trials of its own step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from caramba.config.train import PhaseConfig
from caramba.errors import CarambaError, OutOfMemory, one_line
from caramba.experiment.planning.batch import largest_batch
from caramba.experiment.planning.candidate import Budget, Measure, StepCandidate, Trial
from caramba.runtime import Decision

FASTER, DRIFT = (
    0.95,
    0.01,
)  # bfloat16 takes at most this share of float32's time, its loss is at most this far off
CHECKPOINTING = ("none", "selective", "full")
COMPILED_TIMED = 8
WIDE_FITS = 0.6  # of the target: what a step in bfloat16 may take for one in float32, of up to twice that, to be tried
BATCH_SHARE = 0.5  # of the budget for batches, where compilation is measured after them


@dataclass(frozen=True)
class PlanningContext:
    """What a phase is planned on.

    Attributes:
        room_bytes: memory that is free for the phase. most: windows of its data, which no batch exceeds.
        ranks: that train together. rank_bytes: what one holds beyond the process that trials run in, less if negative;
            it is part of the peaks that are measured.
        dtype: by rule or manifest. compares_dtypes: whether bfloat16 and float32 are compared.
        checkpoints: whether there is a graph to checkpoint. compile_modes: beyond no compilation.
    """

    room_bytes: int
    most: int
    dtype: str
    compares_dtypes: bool = False
    checkpoints: bool = True
    compile_modes: tuple[str, ...] = ("default",)
    ranks: int = 1
    rank_bytes: int = 0

    @property
    def rank_note(self) -> str:
        """What a peak of several ranks is made of, empty where it is one process's."""
        if self.ranks == 1 or self.rank_bytes == 0:
            return ""
        how = ("plus", "add") if self.rank_bytes >= 0 else ("less", "share")
        return f", a peak being one process's {how[0]} {_gb(abs(self.rank_bytes))} that {self.ranks} ranks {how[1]}"


def decide(phase: PhaseConfig, ground: PlanningContext, measure: Measure, budget: Budget) -> dict[str, Decision]:
    """Return the decisions of dtype, checkpointing, batch size and compilation, with what was measured for each.

    In this order, since each is measured with those before it: checkpointing changes how many sequences fit, and the
    batch what precision and compilation gain. Where bfloat16 does not lead at the batch that fits in it, checkpointing
    and batch are found again in float32.

    Raises:
        OutOfMemory: a step does not fit in any config that the manifest allows.
    """
    return _Planner(phase, ground, measure, budget).run()


class _Planner:
    def __init__(self, phase: PhaseConfig, ground: PlanningContext, measure: Measure, budget: Budget) -> None:
        self.phase, self.ground, self.measure, self.budget = phase, ground, measure, budget
        self.decisions: dict[str, Decision] = {}
        self.target = phase.memory_utilization * ground.room_bytes

    def run(self) -> dict[str, Decision]:
        ways = self._checkpointing_ways()
        size = self.phase.batch_size if isinstance(self.phase.batch_size, int) else 1
        candidate = StepCandidate(size, self.ground.dtype, ways[-1])
        trial = self._fitting(candidate, ways)
        if self.ground.compares_dtypes:
            dtype, plain = self._dtype(trial)
            if dtype == "float32":
                trial = self._fitting(replace(candidate, dtype=dtype), ways, plain)
        micro_batches = self.phase.steps * self.phase.gradient_accumulation_steps
        self.budget.cover(trial.step_seconds * micro_batches)
        if self.phase.compile_model == "auto":
            trial = self._compiled(trial, micro_batches)
        elif self.phase.compile_model is not False:
            trial = self._asked_compilation(trial)
        accumulation = self.phase.gradient_accumulation_steps
        self.decisions["step_seconds"] = Decision(
            trial.step_seconds * accumulation, f"measured: {trial.candidate}", trial.figures()
        )
        self.decisions["planning"] = Decision(
            round(self.budget.spent, 2),
            f"seconds, of {self.budget.seconds:.0f} allowed; skipped: {'; '.join(self.budget.skipped) or 'nothing'}",
            {"spent_seconds": self.budget.spent, "allowed_seconds": self.budget.seconds},
        )
        return self.decisions

    def _checkpointing_ways(self) -> tuple[str, ...]:
        asked = self.phase.activation_checkpointing
        if not self.ground.checkpoints:
            return ("none",)
        if asked == "auto":
            return CHECKPOINTING
        return (asked,) if self.phase.activation_checkpoint_threshold is None else ("none", asked)

    def _dtype(self, best: Trial) -> tuple[str, Trial]:
        """Hold bfloat16 against float32 on the same steps from the same weights, at the batch that bfloat16 takes or,
        where a float32 step has no room for it, at half of it, a quarter, ...; return the dtype and float32's trial."""
        size, is_open = best.candidate.batch_size, self.phase.batch_size == "auto"
        if is_open and best.peak_bytes > WIDE_FITS * self.target:
            size = max(1, size // 2)
        plain = self.measure(replace(best.candidate, dtype="float32", batch_size=size))
        while is_open and size > 1 and not _fits(plain, self.target) and not _is_final(plain):
            size //= 2
            plain = self.measure(replace(plain.candidate, batch_size=size))
        is_same = size == best.candidate.batch_size
        narrow = best if is_same else self.measure(replace(best.candidate, batch_size=size))
        failed = plain if plain.refusal else narrow
        refusal = failed.refusal
        if is_open and not refusal and plain.peak_bytes > self.target:  # no batch of it would be taken either
            failed, refusal = plain, f"takes {_gb(plain.peak_bytes)}, over memory_utilization"
        if refusal:
            chosen, measured = self.ground.dtype, None
            reason = f"{failed.candidate}: {refusal}"
        else:
            share = narrow.step_seconds / plain.step_seconds
            drift = abs(narrow.loss - plain.loss) / max(abs(plain.loss), 1e-12)
            chosen = "bfloat16" if share <= FASTER and drift <= DRIFT else "float32"
            reason = (
                f"bfloat16 takes {share:.2f} of float32's time at batch {size}; its loss is "
                f"{drift:.2%} off after {narrow.candidate.timed + narrow.candidate.warm_up} steps"
            )
            measured = {
                "batch_size": float(size),
                "float32_seconds": plain.step_seconds,
                "bfloat16_seconds": narrow.step_seconds,
                "loss_drift": drift,
            }
        is_narrow = chosen == "bfloat16"
        self.decisions["dtype"] = Decision(chosen, f"auto: {reason}", measured)
        self.decisions["precision"] = Decision("bf16-mixed" if is_narrow else "32-true", f"dtype={chosen}")
        return chosen, plain

    def _fitting(self, candidate: StepCandidate, ways: Sequence[str], known: Trial | None = None) -> Trial:
        """Decide checkpointing, the least that fits, and with it the batch; `known` is a trial that was made before."""
        notes: list[str] = []
        trial: Trial | None = None
        for way in ways:
            is_known = known is not None and known.candidate.activation_checkpointing == way
            trial = self._with(replace(candidate, activation_checkpointing=way), known=known if is_known else None)
            if not trial.refusal and (way == ways[-1] or trial.peak_bytes <= self._limit(way, ways)):
                break
            notes.append(f"{way} {'does not fit' if trial.refusal else f'takes {_gb(trial.peak_bytes)}'}")
        assert trial is not None
        if trial.refusal:
            raise OutOfMemory(
                f"{self.phase.phase}: a step of {trial.candidate} at block_size={self.phase.block_size} does not run "
                f"in {_gb(self.ground.room_bytes)} of free memory ({trial.refusal}); use a smaller "
                f"{'block_size' if trial.candidate.batch_size == 1 else 'batch_size'}, "
                f"activation_checkpointing=full, or a smaller model{self._by_hand()}"
            )
        way = trial.candidate.activation_checkpointing
        if len(ways) > 1:
            self.decisions["activation_checkpointing"] = Decision(
                way,
                f"the least that fits {_gb(self._limit(way, ways))}{': ' if notes else ''}{', '.join(notes)}",
                trial.figures(),
            )
        return trial

    def _by_hand(self) -> str:
        """Say what is left where the ranks would share what one device has no room for."""
        if self.ground.rank_bytes >= 0:
            return ""
        keys = ", ".join(self.phase.measured_keys)
        return (
            f"; it is measured in one process with the whole model, which {self.ground.ranks} ranks would share: where "
            f"that has no room, give {keys} by hand (caramba compile estimates what a rank holds)"
        )

    def _limit(self, way: str, ways: Sequence[str]) -> float:
        threshold = self.phase.activation_checkpoint_threshold
        is_least = way == ways[0] and len(ways) > 1
        return self.target if threshold is None or not is_least else threshold * self.ground.room_bytes

    def _with(self, candidate: StepCandidate, *, known: Trial | None) -> Trial:
        """Try a candidate; with batch_size=auto the largest batch that fits."""
        if self.phase.batch_size != "auto":
            return known or self.measure(candidate)
        best, trials, _ = largest_batch(
            self.measure,
            candidate,
            target_bytes=self.target,
            most=self.ground.most,
            budget=self.budget,
            share=1.0 if self.phase.compile_model is False else BATCH_SHARE,
            known=known,
        )
        if best is None:
            first = trials[0]
            refusal = first.refusal or f"one sequence takes {_gb(first.peak_bytes)}, over memory_utilization"
            return replace(first, refusal=refusal)
        sizes = {str(trial.candidate.batch_size): trial for trial in trials}
        tried = ", ".join(
            f"{size}: {trial.refusal or f'{_gb(trial.peak_bytes)} {trial.samples_per_s:.1f}/s'}"
            for size, trial in sizes.items()
        )
        largest = max(trial.candidate.batch_size for trial in trials if _fits(trial, self.target))
        kind = "the most" if best.candidate.batch_size == largest else "the fastest"
        if best.candidate.batch_size == self.ground.most:
            kind = "all windows of the data"
        self.decisions["batch_size"] = Decision(
            best.candidate.batch_size,
            f"auto: {kind} within {_gb(self.target)}, "
            f"{self.phase.memory_utilization:.0%} of what is free{self.ground.rank_note} (tried {tried})",
            best.figures() | {"samples_per_s": best.samples_per_s, "target_bytes": self.target},
        )
        return best

    def _compiled(self, plain: Trial, micro_batches: int) -> Trial:
        """Choose the compile mode with the shortest run."""
        plain = self._again(plain)
        totals: dict[Any, float] = {False: plain.step_seconds * micro_batches}
        trials: dict[Any, Trial] = {False: plain}
        for mode in self.ground.compile_modes:
            candidate = replace(plain.candidate, compile_model=mode, timed=COMPILED_TIMED)
            # Modes come in the order of how long they compile: none takes less than the one before it.
            start_s = max((trial.start_seconds for mode, trial in trials.items() if mode), default=0.0)
            if not self.budget.allows(candidate, start_s + self._least_seconds(candidate, plain)):
                continue
            try:
                trial = self.measure(candidate)
            except CarambaError as error:  # this compile mode fails here, and the plan records it
                trial = Trial(candidate, refusal=one_line(error)[:300])
            if trial.refusal or trial.peak_bytes > self.target:
                self.budget.skip(candidate, trial.refusal or f"takes {_gb(trial.peak_bytes)}")
                continue
            trials[mode] = trial
            totals[mode] = trial.start_seconds + trial.step_seconds * micro_batches
        best = min(totals, key=lambda mode: totals[mode])
        shown = ", ".join(f"{_mode(mode)} {total:.1f} s" for mode, total in totals.items())
        figures = {
            f"{_mode(mode)}.{key}": value for mode, trial in trials.items() for key, value in trial.figures().items()
        }
        self.decisions["compile_model"] = Decision(
            best, f"auto: over {micro_batches} micro-batches, compilation included: {shown}", figures
        )
        return trials[best]

    def _again(self, trial: Trial) -> Trial:
        """Time as many steps without compilation as with it."""
        candidate = replace(trial.candidate, timed=COMPILED_TIMED)
        if not self.budget.allows(candidate, self._least_seconds(candidate, trial)):
            return trial
        longer = self.measure(candidate)
        return trial if longer.refusal else longer

    @staticmethod
    def _least_seconds(candidate: StepCandidate, plain: Trial) -> float:
        return plain.step_seconds * (candidate.warm_up + candidate.timed)

    def _asked_compilation(self, plain: Trial) -> Trial:
        """Measure the step as the manifest asks for it, so that what is foretold is that."""
        candidate = replace(plain.candidate, compile_model=self.phase.compile_model, timed=COMPILED_TIMED)
        if not self.budget.allows(candidate, self._least_seconds(candidate, plain)):
            return plain
        trial = self.measure(candidate)
        if trial.refusal:
            self.budget.skip(candidate, trial.refusal)
            return plain
        return trial


def _is_final(trial: Trial) -> bool:
    """Whether a smaller batch would fare no better: it was refused for another reason than memory."""
    return bool(trial.refusal) and not trial.is_out_of_memory


def _fits(trial: Trial, target: float) -> bool:
    return not trial.refusal and trial.peak_bytes <= target


def _mode(mode: bool | str) -> str:
    return "off" if mode is False else str(mode)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
