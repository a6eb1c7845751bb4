"""`hydra/sweeper=optuna`: points that Optuna proposes from what the finished ones measured, one front end for all.

Hydra's own plugin would compose again in every worker; here a trial is an ordinary point of a sweep: asked for, frozen
and run like any other, its value read from the run's report. The study is kept in the sweep directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hydra.core.override_parser.types import Glob, IntervalSweep, RangeSweep
from pydantic import Field

from caramba.artifacts.across_runs.gather import read_metrics
from caramba.artifacts.across_runs.summary import prefers_higher
from caramba.config.base import Config
from caramba.config.layer_base import Positive
from caramba.config.manifest import Manifest
from caramba.config.parallel import LauncherConfig
from caramba.config.parse import parse_as
from caramba.console import print_stderr
from caramba.errors import CarambaError, ConfigError, nearest
from caramba.launch.overrides import CommandLine, expand_sweep, refuse_unsafe_overrides, split_sign
from caramba.launch.sweeps.grid import check_point
from caramba.launch.sweeps.runner import SweepRunner
from caramba.runs.state import FAILED, FINISHED
from caramba.runs.sweeps import Point, Sweep, add_point, create_sweep, find_sweep

if TYPE_CHECKING:
    import optuna

STUDY = "study.log"


def run_search(args: CommandLine) -> int:
    """Start a search, or resume the one of the same command; return its exit status.

    Raises:
        ConfigError: Optuna is not installed, a setting or distribution that it cannot have, or a first point that
            cannot run; nothing is started.
    """
    _need_optuna()
    words, settings = split_settings(args.overrides)
    space = read_space(words, args.config_dirs)
    middle = {key: first_value(distribution) for key, distribution in space.distributions.items()}
    manifest, ready = check_point([*space.fixed, *space.overrides(middle)], args.config_dirs)
    metric = settings.metric or default_metric(manifest)
    direction = settings.direction
    if direction == "auto":
        direction = "maximize" if prefers_higher(metric) else "minimize"
    chosen = settings.model_copy(update={"metric": metric, "direction": direction})
    own = json.dumps([ready.experiment, sorted(words), chosen.model_dump(exclude={"n_trials"})])
    experiment = hashlib.sha256(own.encode()).hexdigest()
    sweep = None if ready.is_fresh else find_sweep(manifest.name, experiment)
    if manifest.launcher.is_slurm:
        raise ConfigError(
            f"launcher={manifest.launcher.type}: a search draws its points from the results of others, and a SLURM "
            "array has all points at once; use launcher=process within a job, or -m with values"
        )
    if sweep is None:
        sweep = create_sweep(manifest.name, words, experiment)
    sweep.settings = {
        "search": chosen.model_dump(),
        "config_dirs": [str(folder) for folder in args.config_dirs],
        "launcher": manifest.launcher.model_dump(mode="json"),
        "device": manifest.device,
    }
    sweep.save()
    return SearchRunner(sweep, space, chosen, args.worker_flags).resume()


def resume_search(sweep: Sweep, flags: list[str]) -> int:
    """Resume a search with its stored settings; return its exit status."""
    _need_optuna()
    space = read_space(sweep.overrides, [Path(folder) for folder in sweep.settings["config_dirs"]])
    settings = parse_as(SearchConfig, sweep.settings["search"])
    return SearchRunner(sweep, space, settings, flags).resume()


class SearchRunner(SweepRunner):
    """Run a sweep whose points Optuna samples while it runs. A trial that cannot be built counts as failed."""

    def __init__(self, sweep: Sweep, space: Space, settings: SearchConfig, flags: list[str]) -> None:
        launcher = parse_as(LauncherConfig, sweep.settings["launcher"])
        super().__init__(sweep, launcher, flags)
        self.space, self.settings = space, settings
        assert settings.metric is not None
        self.metric = settings.metric
        self.study = open_study(sweep, settings)

    @property
    def total(self) -> int:
        return max(self.settings.n_trials, len(self.sweep.points))

    def run_pending(self) -> bool:
        self._report_finished_points()
        again = self.list_unfinished()
        n_sampled = len(self.study.trials) - self._count_lost_trials()
        left = max(0, self.settings.n_trials - n_sampled)
        return self.run(self._propose(again, left), len(again) + left, self.sweep.settings["device"])

    def _report_finished_points(self) -> None:
        """Tell Optuna of points that finished when no front end ran."""
        for point in self.sweep.points:
            if point.state == FINISHED and "value" not in point.values:
                self.on_end(point)

    def _count_lost_trials(self) -> int:
        """Close the trials that a killed front end drew and did not list as points; return how many there ever were."""
        from optuna.trial import TrialState

        listed = {point.values["trial"] for point in self.sweep.points}
        count = int(self.study.user_attrs.get("lost", 0))
        for trial in self.study.trials:
            if not trial.state.is_finished() and trial.number not in listed:
                self.study.tell(trial.number, state=TrialState.FAIL)
                count += 1
        self.study.set_user_attr("lost", count)
        return count

    def _propose(self, again: list[Point], left: int) -> Iterator[Point]:
        yield from again
        for _ in range(left):
            trial = self.study.ask(self.space.distributions)
            point = self._freeze(trial)
            if point is not None:
                yield point

    def _freeze(self, trial: optuna.Trial) -> Point | None:
        """Make a trial a point of the sweep; None when it needs no run: it cannot have one, or has had it."""
        from optuna.trial import TrialState

        words = self.space.overrides(trial.params)
        number = len(self.sweep.points)
        folders = [Path(folder) for folder in self.sweep.settings["config_dirs"]]
        try:
            manifest, ready = check_point([*words, *self.space.fixed], folders)
        except CarambaError as error:
            self.study.tell(trial, state=TrialState.FAIL)
            print_stderr(f"  trial {trial.number} cannot run: {str(error).splitlines()[0]}")
            return None
        twin = next((item for item in self.sweep.points if item.experiment == ready.experiment), None)
        if twin is not None and twin.state == FINISHED and "value" in twin.values:
            self.study.tell(trial, twin.values["value"])
            return None
        point = Point(number, words, ready.experiment, values={"trial": trial.number})
        add_point(self.sweep, point, manifest)
        return point

    def on_end(self, point: Point) -> None:
        """Tell Optuna how a trial ended. An interrupted trial will resume and is not reported.

        Raises:
            ConfigError: the run has finished and does not measure the metric.
        """
        import optuna

        frozen = self.study.trials[point.values["trial"]]
        if point.state == FAILED and frozen.state == optuna.trial.TrialState.RUNNING:
            self.study.tell(frozen.number, state=optuna.trial.TrialState.FAIL)
        if point.state != FINISHED:
            return
        run = self.sweep.run_of(point)
        assert run is not None
        metrics = read_metrics(run)
        if self.metric not in metrics:
            raise ConfigError(
                f"hydra.sweeper.metric={self.metric}: {run} does not measure it{nearest(self.metric, metrics) or ';'} "
                f"measured: {', '.join(list(metrics)[:12])}"
            )
        value = point.values["value"] = metrics[self.metric].value
        if frozen.state == optuna.trial.TrialState.RUNNING:
            self.study.tell(frozen.number, value)
        else:  # it had failed, and was tried again
            params = {"params": frozen.params, "distributions": frozen.distributions}
            self.study.add_trial(optuna.create_trial(value=value, **params))
        self.sweep.save()

    def report(self, *, is_interrupted: bool) -> int:
        found = [point for point in self.sweep.points if "value" in point.values]
        status = super().report(is_interrupted=is_interrupted)
        if found:
            sign = -1 if self.settings.direction == "maximize" else 1
            best = min(found, key=lambda point: sign * point.values["value"])
            print_stderr(f"best {self.metric}: {best.values['value']:.6g} at {best.title}")
        return status


def open_study(sweep: Sweep, settings: SearchConfig) -> optuna.Study:
    """Open the study of a sweep. The number of its trials is part of the seed, so that none is sampled twice."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(sweep.folder / STUDY))),
        study_name=sweep.experiment,
        direction=settings.direction,
        load_if_exists=True,
    )
    seed = settings.seed + len(study.trials)
    samplers = optuna.samplers
    study.sampler = samplers.TPESampler(seed=seed) if settings.sampler == "tpe" else samplers.RandomSampler(seed)
    return study


def _need_optuna() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(f"{CHOICE}=optuna: Optuna is not installed; pip install 'caramba[sweep]', or leave it out")


CHOICE, PREFIX = "hydra/sweeper", "hydra.sweeper."


class SearchConfig(Config):
    """What `hydra.sweeper.KEY` sets. Without `metric` it is the student's perplexity, else the last phase's
    held-out loss, or its training loss where it is not validated."""

    n_trials: Positive = 20
    metric: str | None = None
    direction: Literal["auto", "minimize", "maximize"] = "auto"
    sampler: Literal["tpe", "random"] = "tpe"
    seed: Annotated[int, Field(ge=0)] = 1337


@dataclass(frozen=True)
class Space:
    """The words that hold for every trial, and the distribution of each key that a trial draws, by `+key`."""

    fixed: list[str]
    distributions: dict[str, optuna.distributions.BaseDistribution]

    def overrides(self, params: dict[str, Any]) -> list[str]:
        return [f"{key}={value}" for key, value in params.items()]


def split_settings(overrides: list[str]) -> tuple[list[str], SearchConfig]:
    """Return the words of the experiment, and the settings of the search among the others.

    Raises:
        ConfigError: another sweeper, or a setting that there is none of.
    """
    words: list[str] = []
    settings: dict[str, Any] = {}
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key == CHOICE:
            if value != "optuna":
                raise ConfigError(f"{word}: the sweepers are optuna, and without {CHOICE} every combination")
        elif key.startswith(PREFIX):
            name = key.removeprefix(PREFIX).replace("sampler.seed", "seed")
            settings[name] = split_sign(f"{name}={value}")[1].value()
        else:
            words.append(word)
    refuse_unsafe_overrides(words)
    try:
        return words, parse_as(SearchConfig, settings)
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}{error}") from None


def read_space(words: list[str], config_dirs: list[Path]) -> Space:
    """Read `interval(…)`, `tag(log, interval(…))`, `range(…)` and choices as distributions.

    Raises:
        ConfigError: no word has more than one value, or a bound that its distribution cannot have.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    fixed: list[str] = []
    distributions: dict[str, optuna.distributions.BaseDistribution] = {}
    for word in words:
        sign, override = split_sign(word)
        if sign == "~" or not override.is_sweep_override():
            fixed.append(word)
            continue
        key, value = sign + word[len(sign) :].partition("=")[0], override.value()
        try:
            if isinstance(value, IntervalSweep):
                assert value.start is not None
                assert value.end is not None
                is_log = "log" in value.tags
                is_int = isinstance(value.start, int) and isinstance(value.end, int)
                kind = IntDistribution if is_int else FloatDistribution
                distributions[key] = kind(value.start, value.end, log=is_log)  # type: ignore[arg-type]
            elif isinstance(value, RangeSweep) and isinstance(value.start, int) and isinstance(value.step, int):
                assert value.stop is not None
                last = range(value.start, int(value.stop), value.step)[-1]
                distributions[key] = IntDistribution(value.start, last, step=value.step)
            elif isinstance(value, Glob):
                options = [item[0].partition("=")[2] for item in expand_sweep([word], config_dirs)]
                distributions[key] = CategoricalDistribution(options)
            else:
                distributions[key] = CategoricalDistribution(list(override.sweep_string_iterator()))
        except (ValueError, IndexError) as error:
            raise ConfigError(f"command line: {word}: {error}") from None
    if not distributions:
        raise ConfigError(
            f"{CHOICE}=optuna: no key has values to draw from; write KEY=interval(a,b), 'KEY=tag(log,interval(a,b))', "
            "KEY=range(a,b) or KEY=choice(a,b)"
        )
    return Space(fixed, distributions)


def default_metric(manifest: Manifest) -> str:
    """Return the default metric of a search: the student's perplexity, else the held-out loss of the last
    phase, where it is measured, else its training loss.

    Raises:
        ConfigError: the runs measure neither.
    """
    group = manifest.groups_to_run()[-1]
    prefix = f"{group.name}/" if len(manifest.groups_to_run()) > 1 else ""
    if any(bench.config.type == "perplexity" for bench in group.benchmarks):
        return f"{prefix}perplexity.student.perplexity"
    phases = [run for run, _ in group.trained]
    if not phases:
        raise ConfigError(f"{PREFIX}metric: the runs measure no perplexity and train nothing; name a metric")
    last = phases[-1].train
    assert last is not None
    kind = "val_loss" if last.eval_every is not None and last.eval_every <= last.steps else "loss"
    return f"{prefix}{kind}.{phases[-1].id}"


def first_value(distribution: optuna.distributions.BaseDistribution) -> Any:
    choices = getattr(distribution, "choices", None)
    return choices[0] if choices is not None else getattr(distribution, "low")  # noqa: B009 - of two classes
