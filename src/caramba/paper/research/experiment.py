"""Runs a registered comparison: both arms of each seed through the launcher, a look of the test after each pair.

Every event is in the ledger before the next begins, so a loop that was killed repeats no finished run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from caramba.config.manifest import Manifest
from caramba.config.paper import GateConfig
from caramba.config.parse import parse_as
from caramba.console import logger
from caramba.errors import ConfigError, nearest
from caramba.paper.research.gate import Look, Pair, best_trial, budget_difference, look
from caramba.paper.research.ledger import Ledger
from caramba.paper.research.proposal import Proposal, arm_manifest
from caramba.runs import read_manifest
from caramba.runs.files import sha256_of, write_whole
from caramba.runs.manifest import canonical_json, manifest_sha256

ARMS = ("baseline", "candidate")
Launch = Callable[[Sequence[str], Path, float | None], int]


class Comparison:
    """One proposal against its base, in a folder with its ledger, its manifests and its runs."""

    def __init__(
        self,
        folder: Path,
        base: Path,
        gate: GateConfig,
        *,
        timeout_s: float | None = None,
        launch: Launch | None = None,
    ) -> None:
        """Take the base run `base`; `timeout_s` is the longest time of one run, which counts as failed after it."""
        self.folder, self.gate, self.timeout_s = folder, gate, timeout_s
        self.base: Manifest = read_manifest(base)
        _check_base(base, self.base, gate)
        self._launch = launch or launch_run
        self.ledger = Ledger(folder)

    def run(self, proposal: Proposal) -> Look:
        """Run the pairs of a proposal until the test decides, and return its last look.

        Raises:
            ConfigError: another test is registered here, the proposal fits no manifest, or there were as many
                candidates as registered.
        """
        changes = (None, proposal)
        for trial in ((), *proposal.trials):
            for change in changes:
                self._plan(proposal.name, arm_manifest(self.base, self.gate.seeds[0], change, trial))
        self._register(proposal)
        tuned = self._tune(proposal)
        trials = ((), *proposal.trials)
        pairs: list[Pair] = []
        seen = Look(0, 1.0, "continue")
        for seed in self.gate.seeds:
            lines = [
                self._run_at(
                    run_place(proposal.name, arm, seed, tuned[arm]),
                    arm_manifest(self.base, seed, change, trials[tuned[arm]]),
                    "run", arm=arm, seed=seed,
                )
                for arm, change in zip(ARMS, changes, strict=True)
            ]  # fmt: skip
            pairs.append(self._pair(seed, lines))
            seen = look(pairs, self.gate)
            looks = [line for line in self.ledger.of("look") if line["proposal"] == proposal.name]
            if len(looks) < len(pairs):
                self.ledger.append("look", proposal=proposal.name, **asdict(seen))
            logger.info(
                f"research: {proposal.name}, seed {seed}: e-value {seen.e_value:.4g} of {self.gate.threshold:g}, "
                f"{seen.state}"
            )
            if seen.state != "continue":
                break
        if not any(line["proposal"] == proposal.name for line in self.ledger.of("decision")):
            self.ledger.append("decision", proposal=proposal.name, state=seen.state, n_seeds=seen.n_seeds)
        return seen

    def _tune(self, proposal: Proposal) -> dict[str, int]:
        """Run every trial in both arms, so that each has as many, and return which one each arm takes, 0 for none."""
        trials = ((), *proposal.trials) if proposal.trials else ()
        metrics: dict[str, list[float | None]] = {arm: [] for arm in ARMS}
        for number, trial in enumerate(trials):
            for arm, change in zip(ARMS, (None, proposal), strict=True):
                seed = max(self.gate.seeds) + 2  # of no pair
                line = self._run_at(
                    trial_place(proposal.name, arm, number), arm_manifest(self.base, seed, change, trial),
                    "trial", proposal=proposal.name, arm=arm, trial=number, seed=seed,
                )  # fmt: skip
                metrics[arm].append(line["metric"])
        if not trials:
            return dict.fromkeys(ARMS, 0)
        tuned = {arm: best_trial(metrics[arm], self.gate) for arm in ARMS}
        if not any(line["proposal"] == proposal.name for line in self.ledger.of("tuned")):
            self.ledger.append("tuned", proposal=proposal.name, n_trials=len(trials), **tuned)
        return tuned

    def _register(self, proposal: Proposal) -> None:
        registered = self.ledger.of("registration")
        gate = self.gate.model_dump(mode="json")
        if not registered:
            self.ledger.append("registration", gate=gate, base_sha256=manifest_sha256(self.base))
        elif registered[0]["gate"] != gate or registered[0]["base_sha256"] != manifest_sha256(self.base):
            raise ConfigError(
                f"{self.ledger.file}, line {registered[0]['n']}: another test or base is registered; a test is not "
                "changed after its runs began; name another folder"
            )
        plain = proposal.model_dump(mode="json", exclude_defaults=True)
        proposals = {line["proposal"]["name"]: line["proposal"] for line in self.ledger.of("proposal")}
        if proposal.name in proposals:
            if proposals[proposal.name] != plain:
                raise ConfigError(f"proposal {proposal.name} was changed after its registration; give it another name")
            return
        if len(proposals) >= self.gate.candidates:
            raise ConfigError(
                f"{self.ledger.file}: there were {len(proposals)} candidates, as many as research.gate.candidates "
                "registered; begin another loop in another folder"
            )
        self.ledger.append("proposal", proposal=plain)

    def _plan(self, name: str, manifest: Manifest) -> None:
        """Compile a manifest, as `caramba compile` does, before anything runs."""
        file = self.folder / "experiments" / name / "planned.json"
        write_whole(file, canonical_json(manifest))
        done = subprocess.run(
            [sys.executable, "-m", "caramba", "compile", f"manifest={file}"],
            cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ConfigError(f"proposal {name}: its manifest cannot be run: {done.stderr.strip()[-2000:]}")

    def open_held_out(self, proposal: Proposal) -> dict[str, dict[str, Any]]:
        """Train the winner and its baseline once more and measure both on the held-out tokens; by arm, their lines.

        Raises:
            ConfigError: the held-out tokens were opened for another candidate.
        """
        opened = self.ledger.of("held_out_opened")
        if not opened or opened[0]["proposal"] != proposal.name:
            self.ledger.append("held_out_opened", proposal=proposal.name, tokens=str(self.gate.held_out))
        seed = max(self.gate.seeds) + 1
        tuned, trials = self._tune(proposal), ((), *proposal.trials)
        found: dict[str, dict[str, Any]] = {}
        for arm, change in zip(ARMS, (None, proposal), strict=True):
            manifest = arm_manifest(self.base, seed, change, trials[tuned[arm]])
            manifest = on_held_out(manifest, str(self.gate.held_out))
            place = Path("experiments") / "held_out" / arm
            found[arm] = self._run_at(place, manifest, "held_out_run", arm=arm, seed=seed)
        return found

    def _run_at(self, place: Path, manifest: Manifest, event: str, **fields: Any) -> dict[str, Any]:
        """Run a manifest unless the ledger has its run, and return the run's line."""
        for line in self.ledger.of(event):
            if line["place"] == place.as_posix():
                return line
        folder, digest = self.folder / place, manifest_sha256(manifest)
        was_begun = any(line["place"] == place.as_posix() for line in self.ledger.of("run_started"))
        began = time.monotonic()
        if was_begun and (found := read_run(folder, self.gate.metric))["report"] is not None:
            status, seconds = (
                0,
                float(found["seconds"]),
            )  # it finished, and a kill kept that from being recorded
        else:
            write_whole(folder / "manifest.json", canonical_json(manifest))
            if not was_begun:
                self.ledger.append("run_started", place=place.as_posix(), manifest_sha256=digest)
            status = self._launch(
                [sys.executable, "-m", "caramba.launch", f"manifest={folder / 'manifest.json'}", "--quiet"],
                folder,
                self.timeout_s,
            )
            seconds = time.monotonic() - began
            found = read_run(folder, self.gate.metric)
        facts = {**found, "seconds": round(seconds, 3)}
        return self.ledger.append(
            event, place=place.as_posix(), manifest_sha256=digest, status=status, **fields, **facts
        )

    def _pair(self, seed: int, lines: Sequence[dict[str, Any]]) -> Pair:
        return pair_of(seed, lines[0], lines[1], self.gate)


def run_place(name: str, arm: str, seed: int, trial: int) -> Path:
    """Return the folder of a run; a baseline that no trial improved is run once per seed for all candidates."""
    folder = name if arm == "candidate" else f"{name}/baseline" if trial else "baseline"
    return Path("experiments") / folder / f"seed{seed}"


def trial_place(name: str, arm: str, trial: int) -> Path:
    """Return the folder of a tuning trial of one arm."""
    return Path("experiments") / name / f"trial{trial}" / arm


def pair_of(seed: int, baseline: dict[str, Any], candidate: dict[str, Any], gate: GateConfig) -> Pair:
    """Return a pair from two lines of the ledger; a candidate that spent more than its share counts as failed."""
    metric = candidate["metric"]
    limit = 0.0 if gate.budget == "tokens" else gate.wall_tolerance
    spent = "tokens" if gate.budget == "tokens" else "seconds"
    if metric is not None and baseline["metric"] is not None:
        is_over = candidate[spent] > baseline[spent] and budget_difference(baseline[spent], candidate[spent]) > limit
        metric = None if is_over else metric
    return Pair(seed, baseline["metric"], metric)


def read_run(folder: Path, metric: str) -> dict[str, Any]:
    """Return what the ledger keeps of a run below `folder`: the metric, None where it failed, its report and tokens."""
    reports = sorted(folder.glob("runs/*/*/artifacts/report.json"))
    if not reports:
        return {"metric": None, "tokens": 0, "seconds": 0.0, "report": None, "report_sha256": None}
    report = json.loads(reports[-1].read_text(encoding="utf-8"))
    found = report["metrics"].get(metric)
    return {
        "metric": None if found is None else float(found["value"]),
        "tokens": sum(int(phase["tokens"] or 0) for phase in report["phases"]),
        "seconds": sum(float(phase.get("seconds") or 0) for phase in report["phases"]),
        "report": reports[-1].relative_to(folder).as_posix(),
        "report_sha256": sha256_of(reports[-1]),
    }


def on_held_out(manifest: Manifest, tokens: str) -> Manifest:
    """Return a manifest whose perplexity is measured on other tokens."""
    plain: dict[str, Any] = json.loads(json.dumps(manifest.model_dump(mode="json")))
    for group in plain["groups"]:
        for bench in group["benchmarks"]:
            if bench["config"]["type"] == "perplexity":
                bench["config"]["dataset"] = tokens
    return parse_as(Manifest, plain)


def _check_base(run: Path, manifest: Manifest, gate: GateConfig) -> None:
    """Refuse, before anything is registered, a metric that the run did not write and a run without held-out text."""
    file = run / "artifacts" / "report.json"
    if not file.is_file():
        raise ConfigError(f"{run}: no artifacts/report.json; finish the run with `caramba resume {run}`")
    metrics = cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8"))["metrics"])
    if gate.metric not in metrics:
        raise ConfigError(
            f"research.gate.metric={gate.metric}: no benchmark of {run.name} writes it"
            f"{nearest(gate.metric, metrics) or '; metrics: ' + ', '.join(list(metrics)[:8])}"
        )
    for group in manifest.groups_to_run():
        data = group.data
        if getattr(data, "val_frac", 0) == 0 and getattr(data, "val_path", None) is None:
            raise ConfigError(f"{run}: group {group.name} has no held-out split; set data.val_frac or data.val_path")


def launch_run(command: Sequence[str], folder: Path, timeout_s: float | None) -> int:
    """Run the launcher in `folder`, its output in launch.log, and return its exit status; 124 after the time limit."""
    home = os.environ.get("CARAMBA_HOME", str(Path(".caramba").absolute()))
    with open(folder / "launch.log", "wb") as log:
        try:
            return subprocess.run(
                command, cwd=folder, env={**os.environ, "CARAMBA_HOME": home}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, check=False, timeout=timeout_s,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124
