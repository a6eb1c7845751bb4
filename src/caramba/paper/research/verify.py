"""Recomputes every look and decision of a ledger from the artifacts of its runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from caramba.config.parse import parse_as
from caramba.config.research import GateConfig
from caramba.errors import ConfigError
from caramba.paper.research.experiment import pair_of, read_run
from caramba.paper.research.gate import Pair, look
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
    counts = {"lines": len(lines), "runs": 0, "looks": 0, "decisions": 0, "held_out_runs": 0}
    for line in lines:
        where = f"{file}, line {line['n']}: "
        match line["event"]:
            case "registration":
                gate = parse_as(GateConfig, line["gate"])
            case "proposal":
                proposal = parse_as(Proposal, line["proposal"])
                proposals[proposal.name] = proposal
            case "run" if gate is not None:
                _check_run(folder, line, gate, where)
                runs[line["place"]] = line
                counts["runs"] += 1
            case "look" if gate is not None:
                name = line["proposal"]
                pairs = _pairs(name, runs, gate, line["n_seeds"], where)
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
            case "run" | "look":
                raise ConfigError(f"{where}comes before the registration of a test")
            case _:
                pass
    _check_manifests(folder, runs, proposals)
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


def _pairs(name: str, runs: dict[str, dict[str, Any]], gate: GateConfig, n: int, where: str) -> list[Pair]:
    pairs: list[Pair] = []
    for seed in gate.seeds[:n]:
        arms = [runs.get(f"experiments/{arm}/seed{seed}") for arm in ("baseline", name)]
        if arms[0] is None or arms[1] is None:
            raise ConfigError(f"{where}seed {seed} has no run in both arms before this look")
        pairs.append(pair_of(seed, arms[0], arms[1], gate))
    return pairs


def _check_manifests(folder: Path, runs: dict[str, dict[str, Any]], proposals: dict[str, Proposal]) -> None:
    """Check that a candidate's manifest is its baseline's with the registered patches, and nothing else."""
    for place, line in runs.items():
        name = Path(place).parent.name
        baseline = folder / "experiments" / "baseline" / f"seed{line['seed']}" / "manifest.json"
        if line["arm"] == "baseline" or not baseline.is_file():
            continue
        if name not in proposals:
            raise ConfigError(f"{folder / LEDGER}, line {line['n']}: {name} was not registered before it ran")
        base = read_manifest(baseline)
        proposal = proposals[name].model_copy(update={"base_sha256": manifest_sha256(base)})
        if manifest_sha256(arm_manifest(base, line["seed"], proposal)) != line["manifest_sha256"]:
            raise ConfigError(
                f"{folder / LEDGER}, line {line['n']}: its manifest is not the baseline's with the registered patches"
            )
