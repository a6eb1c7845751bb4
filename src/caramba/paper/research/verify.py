"""Recomputes every look and decision of a ledger from the artifacts of its runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from caramba.config.paper import GateConfig
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from caramba.paper.research.experiment import ARMS, pair_of, read_run, run_place, trial_place
from caramba.paper.research.gate import Pair, best_trial, look
from caramba.paper.research.ledger import LEDGER, read_ledger
from caramba.paper.research.proposal import Proposal, arm_manifest
from caramba.runs import read_manifest
from caramba.runs.files import sha256_of
from caramba.runs.manifest import manifest_sha256


def verify_ledger(folder: Path) -> dict[str, int]:
    """Check the chain, the artifacts of every run, every look and every decision; return how many of each.

    Raises:
        ConfigError: no ledger, or the first line that does not hold, by its number.
    """
    file = folder / LEDGER
    if not file.is_file():
        raise ConfigError(f"{folder}: no {LEDGER}; name the folder of a comparison")
    lines = read_ledger(file)
    gate: GateConfig | None = None
    runs: dict[str, dict[str, Any]] = {}
    proposals: dict[str, Proposal] = {}
    last: dict[str, str] = {}
    tuned: dict[str, dict[str, int]] = {}
    counts = {"lines": len(lines), "trials": 0, "runs": 0, "looks": 0, "decisions": 0, "held_out_runs": 0}
    for line in lines:
        where = f"{file}, line {line['n']}: "
        match line["event"]:
            case "registration":
                gate = parse_as(GateConfig, line["gate"])
            case "proposal":
                proposal = parse_as(Proposal, line["proposal"])
                proposals[proposal.name] = proposal
            case "run" | "trial" if gate is not None:
                _check_run(folder, line, gate, where)
                runs[line["place"]] = line
                counts[f"{line['event']}s"] += 1
            case "tuned" if gate is not None:
                name, n = line["proposal"], len(proposals[line["proposal"]].trials) + 1
                expected = {"n_trials": n, **{arm: _best(name, arm, n, runs, gate, where) for arm in ARMS}}
                if (stated := {key: line[key] for key in expected}) != expected:
                    raise ConfigError(f"{where}states {stated}, its trials give {expected}")
                tuned[name] = {arm: line[arm] for arm in ARMS}
            case "look" if gate is not None:
                name = line["proposal"]
                if proposals[name].trials and name not in tuned:
                    raise ConfigError(f"{where}comes before both arms had their {len(proposals[name].trials)} trials")
                pairs = _pairs(name, tuned.get(name, {}), runs, gate, line["n_seeds"], where)
                expected = asdict(look(pairs, gate))
                stated = {key: line[key] for key in expected}
                if stated != expected:
                    raise ConfigError(f"{where}states {stated}, its runs give {expected}")
                last[name] = line["state"]
                counts["looks"] += 1
            case "decision":
                if last.get(line["proposal"]) != line["state"]:
                    raise ConfigError(
                        f"{where}decides {line['state']}, its last look gives {last.get(line['proposal'])}"
                    )
                counts["decisions"] += 1
            case "held_out_run" if gate is not None:
                _check_run(folder, line, gate, where)
                counts["held_out_runs"] += 1
            case "run" | "trial" | "tuned" | "look":
                raise ConfigError(f"{where}comes before the registration of a test")
            case _:
                pass
    _check_manifests(folder, runs, proposals, tuned)
    return counts


def _check_run(folder: Path, line: dict[str, Any], gate: GateConfig, where: str) -> None:
    place = folder / line["place"]
    if line["report"] is not None:
        report = place / line["report"]
        if not report.is_file() or sha256_of(report) != line["report_sha256"]:
            raise ConfigError(f"{where}{report} is not the report that was recorded")
        found = read_run(place, gate.metric)
        if (found["metric"], found["tokens"]) != (line["metric"], line["tokens"]):
            raise ConfigError(f"{where}states {line['metric']}, {report} has {found['metric']}")
    if manifest_sha256(read_manifest(place / "manifest.json")) != line["manifest_sha256"]:
        raise ConfigError(f"{where}{place / 'manifest.json'} is not the manifest that was recorded")


def _best(name: str, arm: str, n: int, runs: dict[str, dict[str, Any]], gate: GateConfig, where: str) -> int:
    """Return the best trial of one arm, which must have had all that were registered for both."""
    lines = [runs.get(trial_place(name, arm, number).as_posix()) for number in range(n)]
    if None in lines:
        raise ConfigError(f"{where}{arm} lacks trial {lines.index(None)} of {n}; both arms have as many")
    return best_trial([line["metric"] for line in lines if line is not None], gate)


def _pairs(
    name: str, tuned: dict[str, int], runs: dict[str, dict[str, Any]], gate: GateConfig, n: int, where: str
) -> list[Pair]:
    pairs: list[Pair] = []
    for seed in gate.seeds[:n]:
        arms = [runs.get(run_place(name, arm, seed, tuned.get(arm, 0)).as_posix()) for arm in ARMS]
        if arms[0] is None or arms[1] is None:
            raise ConfigError(f"{where}seed {seed} has no run in both arms before this look")
        pairs.append(pair_of(seed, arms[0], arms[1], gate))
    return pairs


def _check_manifests(
    folder: Path,
    runs: dict[str, dict[str, Any]],
    proposals: dict[str, Proposal],
    tuned: dict[str, dict[str, int]],
) -> None:
    """Check that a manifest is the untuned baseline's with the registered patches and trial, and nothing else."""
    for place, line in runs.items():
        name, where = place.split("/")[1], f"{folder / LEDGER}, line {line['n']}: "
        is_tuned = name in proposals and proposals[name].trials
        untuned = trial_place(name, "baseline", 0) if is_tuned else run_place(name, "baseline", line["seed"], 0)
        baseline = folder / untuned / "manifest.json"
        if name == "baseline" or not baseline.is_file():
            continue
        if name not in proposals:
            raise ConfigError(f"{where}{name} was not registered before it ran")
        base, arm = read_manifest(baseline), line["arm"]
        proposal = proposals[name].model_copy(update={"base_sha256": manifest_sha256(base)})
        number = line["trial"] if line["event"] == "trial" else tuned.get(name, {}).get(arm, 0)
        change, trial = proposal if arm == "candidate" else None, ((), *proposal.trials)[number]
        if manifest_sha256(arm_manifest(base, line["seed"], change, trial)) != line["manifest_sha256"]:
            raise ConfigError(f"{where}its manifest is not the baseline's with the registered patches")
