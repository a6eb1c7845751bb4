"""The ledger and what is recomputed from it: edits, kills, a second opening, proposals out of range."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from finished_run import write_run

from caramba.config.paper import GateConfig
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from caramba.paper.research import experiment
from caramba.paper.research.experiment import Comparison
from caramba.paper.research.ledger import LEDGER, Ledger
from caramba.paper.research.proposal import Proposal, arm_manifest
from caramba.paper.research.verify import verify_ledger
from caramba.runs import read_manifest
from caramba.runs.files import write_json
from caramba.runs.manifest import differences, manifest_sha256

METRIC = "perplexity.student.nll"
GATE = GateConfig(metric=METRIC, direction="less", candidates=1, seeds=(1, 2, 3, 4, 5, 6))


class Killed(Exception):  # noqa: N818 - names the event
    pass


class Launcher:
    """Writes the report of a run whose loss follows from its learning rate and seed; `stop_at` kills it in a run."""

    def __init__(self, stop_at: int = -1, fails: frozenset[int] = frozenset()) -> None:
        self.places: list[str] = []
        self.stop_at, self.fails = stop_at, fails

    def __call__(self, command: Sequence[str], folder: Path, timeout_s: float | None) -> int:
        if len(self.places) == self.stop_at:
            raise Killed
        self.places.append(folder.as_posix())
        plain = json.loads((folder / "manifest.json").read_text())
        run = plain["groups"][0]["runs"][0]
        if run["seed"] in self.fails and plain["origin"] == "agent":
            return 1
        value = 2.0 + run["seed"] * 0.1 - (0.5 if run["train"]["lr"] == 0.002 else 0.0)
        value -= {0.3: 0.2}.get(run["train"]["weight_decay"], 0.0)
        report = {"metrics": {METRIC: {"value": value}}, "phases": [{"tokens": 100}]}
        target = folder / "runs" / "tiny" / "1" / "artifacts" / "report.json"
        target.parent.mkdir(parents=True)
        write_json(target, report)
        return 0


@pytest.fixture(name="plain_run", scope="module")
def _plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("plain_run")
    write_run(run, labels={})
    return run


@pytest.fixture(name="base")
def _base(plain_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain_run, tmp_path / "base")


@pytest.fixture(autouse=True)
def _without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes seconds; the integration test makes real ones."""
    monkeypatch.setattr(experiment.Comparison, "_plan", lambda self, name, manifest: None)


def proposal(base: Path, **keys: Any) -> Proposal:
    plain: dict[str, Any] = {
        "name": "lower_lr",
        "base_sha256": manifest_sha256(read_manifest(base)),
        "rationale": "The loss oscillates.",
        "hypothesis": "A lower rate ends lower.",
        "smallest_effect": 0.01,
        "patches": [{"key": "lr", "value": 0.002}],
        **keys,
    }
    return parse_as(Proposal, plain)


def test_comparison_is_accepted_and_verified(base: Path, tmp_path: Path) -> None:
    launcher = Launcher()
    seen = Comparison(tmp_path / "c", base, GATE, launch=launcher).run(proposal(base))
    assert (seen.state, seen.n_seeds) == ("accepted", 5)
    assert verify_ledger(tmp_path / "c") == {
        "lines": 28,
        "trials": 0,
        "runs": 10,
        "looks": 5,
        "decisions": 1,
        "held_out_runs": 0,
    }
    again = Comparison(tmp_path / "c", base, GATE, launch=launcher).run(proposal(base))
    assert again == seen
    assert len(launcher.places) == 10


TRIALS = [[{"key": "weight_decay", "value": value}] for value in (0.2, 0.3)]


def test_both_arms_have_as_many_tuning_trials(base: Path, tmp_path: Path) -> None:
    launcher, folder = Launcher(), tmp_path / "c"
    seen = Comparison(folder, base, GATE, launch=launcher).run(proposal(base, trials=TRIALS))
    assert (seen.state, seen.n_seeds) == ("accepted", 5)
    counts = verify_ledger(folder)
    assert (counts["trials"], counts["runs"]) == (6, 10)
    places = [Path(place).relative_to(folder / "experiments").as_posix() for place in launcher.places]
    tried = [f"lower_lr/trial{number}/{arm}" for number in range(3) for arm in ("baseline", "candidate")]
    assert places[:8] == [*tried, "lower_lr/baseline/seed1", "lower_lr/seed1"]  # both take the second trial
    decays = [json.loads(Path(place, "manifest.json").read_text())["groups"][0]["runs"][0]["train"]["weight_decay"]
              for place in launcher.places[6:8]]  # fmt: skip
    assert decays == [0.3, 0.3]
    assert Comparison(folder, base, GATE, launch=launcher).run(proposal(base, trials=TRIALS)) == seen
    assert len(launcher.places) == 16


@pytest.mark.parametrize(
    ("event", "changes", "message"),
    [
        ("trial", None, "baseline lacks trial 0 of 3; both arms have as many"),
        ("tuned", {"baseline": 0}, "its trials give"),
        ("tuned", None, "comes before both arms had their 2 trials"),
    ],
)
def test_unequal_trials_with_a_new_chain_are_found(
    event: str, changes: dict[str, Any] | None, message: str, base: Path, tmp_path: Path
) -> None:
    Comparison(tmp_path / "c", base, GATE, launch=Launcher()).run(proposal(base, trials=TRIALS))
    forged, is_first = Ledger(tmp_path / "d"), True
    for line in Ledger(tmp_path / "c").events:
        fields = {key: value for key, value in line.items() if key not in ("n", "previous", "sha256", "event")}
        if line["event"] == event and is_first:
            is_first = False
            if changes is None:
                continue
            fields |= changes
        forged.append(line["event"], **fields)
    os.rename(forged.file, tmp_path / "c" / LEDGER)
    with pytest.raises(ConfigError, match=message):
        verify_ledger(tmp_path / "c")


def test_equal_arms_are_rejected(base: Path, tmp_path: Path) -> None:
    equal = proposal(base, patches=[{"key": "weight_decay", "value": 0.25}])
    assert Comparison(tmp_path / "c", base, GATE, launch=Launcher()).run(equal).state == "rejected"


def test_failed_candidates_lose(base: Path, tmp_path: Path) -> None:
    launcher = Launcher(fails=frozenset((1, 2, 3)))
    assert Comparison(tmp_path / "c", base, GATE, launch=launcher).run(proposal(base)).state == "rejected"
    verify_ledger(tmp_path / "c")


@pytest.mark.parametrize("stop_at", range(10))
def test_killed_comparison_repeats_no_finished_run(stop_at: int, base: Path, tmp_path: Path) -> None:
    first = Launcher(stop_at)
    with pytest.raises(Killed):
        Comparison(tmp_path / "c", base, GATE, launch=first).run(proposal(base))
    second = Launcher()
    seen = Comparison(tmp_path / "c", base, GATE, launch=second).run(proposal(base))
    assert seen.state == "accepted"
    assert len({*first.places, *second.places}) == len(first.places) + len(second.places) == 10
    verify_ledger(tmp_path / "c")


def test_every_changed_line_is_named(base: Path, tmp_path: Path) -> None:
    Comparison(tmp_path / "c", base, GATE, launch=Launcher()).run(proposal(base))
    file = tmp_path / "c" / LEDGER
    lines = file.read_text().splitlines()
    for number in range(1, len(lines) + 1):
        changed = [*lines]
        changed[number - 1] = changed[number - 1].replace('"event"', '"Event"', 1)
        file.write_text("\n".join(changed) + "\n")
        with pytest.raises(ConfigError, match=rf"line {number}: its hash"):
            verify_ledger(tmp_path / "c")
    file.write_text("\n".join(lines[:3] + lines[4:]) + "\n")
    with pytest.raises(ConfigError, match="line 4: its hash"):
        verify_ledger(tmp_path / "c")


def test_changed_report_is_named(base: Path, tmp_path: Path) -> None:
    Comparison(tmp_path / "c", base, GATE, launch=Launcher()).run(proposal(base))
    report = next((tmp_path / "c").glob("experiments/lower_lr/seed1/runs/*/*/artifacts/report.json"))
    report.write_text(report.read_text().replace("1.6", "1.5"))
    with pytest.raises(ConfigError, match="not the report that was recorded"):
        verify_ledger(tmp_path / "c")


def test_forged_decision_with_a_new_chain_is_found(base: Path, tmp_path: Path) -> None:
    equal = proposal(base, patches=[{"key": "weight_decay", "value": 0.25}])
    Comparison(tmp_path / "c", base, GATE, launch=Launcher()).run(equal)
    events = Ledger(tmp_path / "c").events
    forged = Ledger(tmp_path / "d")
    for line in events:
        fields = {key: value for key, value in line.items() if key not in ("n", "previous", "sha256", "event")}
        forged.append(line["event"], **{**fields, **({"state": "accepted"} if "state" in fields else {})})
    os.rename(forged.file, tmp_path / "c" / LEDGER)
    with pytest.raises(ConfigError, match="its runs give"):
        verify_ledger(tmp_path / "c")


def test_half_a_last_line_is_cut_off(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append("spend", usd=1.0)
    with open(ledger.file, "a") as file:
        file.write('{"n": 2, "eve')
    again = Ledger(tmp_path)
    again.append("spend", usd=2.0)
    assert [line["n"] for line in Ledger(tmp_path).events] == [1, 2]


def test_held_out_split_is_opened_once(tmp_path: Path) -> None:
    Ledger(tmp_path).append("held_out_opened", proposal="a")
    with pytest.raises(ConfigError, match="opened once"):
        Ledger(tmp_path).append("held_out_opened", proposal="b")


def test_another_test_or_candidate_than_registered_is_refused(base: Path, tmp_path: Path) -> None:
    Comparison(tmp_path / "c", base, GATE, launch=Launcher()).run(proposal(base))
    other = GATE.model_copy(update={"direction": "more"})
    with pytest.raises(ConfigError, match="another test or base is registered"):
        Comparison(tmp_path / "c", base, other, launch=Launcher()).run(proposal(base))
    with pytest.raises(ConfigError, match="changed after its registration"):
        Comparison(tmp_path / "c", base, GATE, launch=Launcher()).run(proposal(base, hypothesis="Another."))
    with pytest.raises(ConfigError, match="as many as"):
        Comparison(tmp_path / "c", base, GATE, launch=Launcher()).run(proposal(base, name="second"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"patches": [{"key": "lr", "value": 5.0}]}, "expected a number from"),
        ({"patches": [{"key": "lr", "value": "0.1"}]}, "expected a number from"),
        ({"patches": [{"key": "optimizer", "value": "os.system"}]}, "expected one of adamw, muon"),
        ({"patches": [{"key": "_target_", "value": "os.system"}]}, "key"),
        ({"patches": [{"key": "data.path", "value": "/etc/passwd"}]}, "key"),
        ({"patches": [{"key": "lr", "value": 0.1}, {"key": "lr", "value": 0.01}]}, "two patches"),
        ({"patches": []}, "patches"),
        ({"trials": [[{"key": "lr", "value": 0.1}]]}, "or a trial one of the patches"),
        ({"name": "baseline"}, "the loop has a folder of that name"),
        ({"name": "../x"}, "small letter"),
        ({"plugins": ["evil"]}, "plugins"),
        ({"base_sha256": "x"}, "base_sha256"),
    ],
)
def test_proposals_outside_the_schema_are_refused(keys: dict[str, Any], message: str, base: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        proposal(base, **keys)


def test_arms_have_their_seed_in_every_phase_and_differ_in_the_patches_alone(base: Path) -> None:
    manifest = read_manifest(base)
    arms = [arm_manifest(manifest, 7), arm_manifest(manifest, 7, proposal(base))]
    seeds = [(run.seed, run.train.seed) for arm in arms for run in arm.groups[0].runs if run.train is not None]
    assert set(seeds) == {(7, 7)}
    changed = list(differences(*(arm.model_dump(mode="json") for arm in arms)))
    assert all(line.startswith("origin") or ".lr" in line for line in changed), changed
    assert len(changed) > 1


def test_proposal_on_another_base_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="propose on this run"):
        arm_manifest(read_manifest(base), 1, proposal(base, base_sha256="0" * 64))


def test_unknown_metric_is_refused_before_anything_is_written(base: Path, tmp_path: Path) -> None:
    gate = GATE.model_copy(update={"metric": "perplexity.student.nil"})
    with pytest.raises(ConfigError, match="no benchmark of base writes it; did you mean"):
        Comparison(tmp_path / "c", base, gate)
    assert not (tmp_path / "c").exists()
