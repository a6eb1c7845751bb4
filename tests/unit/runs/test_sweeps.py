"""Sweep directories and the states of runs, from files alone."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time

import pytest

from caramba.config.manifest import parse_manifest
from caramba.errors import ConfigError
from caramba.runs import lock, mint
from caramba.runs.environment import environment_changes
from caramba.runs.events import append_event
from caramba.runs.manifest import experiment_sha256
from caramba.runs.state import run_state
from caramba.runs.sweeps import Point, create_sweep, find_sweep, read_sweep, resolve_sweep


@pytest.fixture(name="manifest", scope="module")
def _manifest():
    layers = [{"type": "RMSNormLayer", "d_model": 8}]
    embedder = {"vocab_size": 300, "d_model": 8}
    model = {"embedder": embedder, "topology": {"type": "StackedTopology", "layers": layers}}
    runs = [{"id": "pre", "train": {"phase": "pretrain", "steps": 40}}]
    groups = [{"name": "main", "data": {"type": "stdlib", "vocab_size": 300}, "runs": runs}]
    return parse_manifest({"name": "demo", "model": model, "groups": groups})


def test_the_state_of_a_run_follows_its_files(manifest, tmp_path):
    run = mint(manifest, [], tmp_path)
    assert run_state(run).state == "waiting"
    append_event(run, "run_started")
    append_event(run, "metrics", phase="pre", step=10, values={"loss": 1.0})
    with lock(run):
        found = run_state(run)
        assert (found.state, found.phase, found.step, found.steps) == ("running", "pre", 10, 40)
    assert run_state(run).state == "interrupted", "a killed worker says nothing"
    with open(run / "events.jsonl", "a") as file:
        file.write('{"event": "metrics", "phase": "pre", "st')
    assert run_state(run).step == 10, "a half-written line is passed over"
    with open(run / "events.jsonl", "a") as file:
        file.write("\n")
    append_event(run, "run_failed", error="boom")
    assert (run_state(run).state, run_state(run).error) == ("failed", "boom")
    append_event(run, "run_started")
    (run / ".result.json.abc.part").write_text('{"status": "finished"')
    assert run_state(run).state == "interrupted", "what is half written is not taken for finished"
    (run / "result.json").write_text(json.dumps({"status": "finished", "name": "demo"}))
    assert run_state(run).state == "finished"
    (run / "result.json").write_text(json.dumps({"status": "failed", "name": "demo"}))
    for event, state in (
        ("run_failed", "failed"),
        ("run_started", "interrupted"),
        ("run_interrupted", "interrupted"),
    ):
        append_event(run, event)
        assert run_state(run).state == state, "what failed was tried again, and stopped"
    ahead = time.time() + 3600
    os.utime(run / "events.jsonl", (ahead, ahead))
    assert run_state(run).age_s < -3500


def test_looking_at_a_lock_never_keeps_a_worker_out(manifest, tmp_path):
    """A status that polls holds the lock for a moment; a worker that starts just then must not be refused."""
    run = mint(manifest, [], tmp_path)
    (run / ".lock").touch()
    with open(run / ".lock") as look:
        fcntl.flock(look, fcntl.LOCK_EX)
        timer = threading.Timer(0.06, lambda: fcntl.flock(look, fcntl.LOCK_UN))
        timer.start()
        with lock(run):
            pass
        timer.join()
    with (
        lock(run),
        pytest.raises(ConfigError, match=rf"process {os.getpid()} is running this run"),
        lock(run),
    ):
        pass


def test_a_sweep_is_found_by_its_experiment_and_read_back(manifest, tmp_path):
    other = manifest.model_copy(update={"launcher": manifest.launcher.model_copy(update={"type": "process"})})
    assert experiment_sha256(other) == experiment_sha256(manifest), "how it is launched is no part of it"
    assert experiment_sha256(manifest.model_copy(update={"seed": 2})) != experiment_sha256(manifest)
    points = [Point(number, [f"seed={number}"], f"e{number}") for number in range(2)]
    sweep = create_sweep("demo", ["seed=0,1"], "abcdef0123", [(point, manifest) for point in points], root=tmp_path)
    assert sweep.folder.parent == tmp_path / "demo" / "sweeps"
    assert sweep.folder.name.endswith("-abcdef01")
    assert read_sweep(sweep.folder) == sweep
    assert find_sweep("demo", "abcdef0123", tmp_path) == sweep
    assert find_sweep("demo", "abcdef0124", tmp_path) is None
    assert resolve_sweep(str(tmp_path / "demo")) == sweep.folder
    assert sweep.manifest(sweep.points[1]) == manifest
    with pytest.raises(ConfigError, match=r"no sweep there .* start one with -m"):
        resolve_sweep("nowhere", tmp_path / "nothing")
    (sweep.folder / "index.json").write_text('{"schema": 1, "points": [')
    with pytest.raises(ConfigError, match="not the index of a sweep"):
        read_sweep(sweep.folder)


def test_a_killed_front_end_leaves_states_that_the_runs_correct(manifest, tmp_path):
    points = [Point(number, [f"seed={number}"], f"e{number}") for number in range(4)]
    sweep = create_sweep("demo", [], "ab" * 8, [(point, manifest) for point in points], root=tmp_path)
    for point in points:
        sweep.link(point, mint(manifest, [], tmp_path))
        point.state = "running"
    done, begun, waiting, gone = (sweep.run_of(point) for point in points)
    (done / "result.json").write_text('{"status": "finished"}')
    append_event(begun, "run_started")
    assert waiting is not None
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    sweep.save()
    again = read_sweep(sweep.folder)
    again.refresh()
    assert [point.state for point in again.points] == ["finished", "interrupted", "interrupted", "waiting"]
    assert again.points[0].runs == [f"../../{done.name}"], "relative, so that the folder can be moved"


def test_what_changed_since_a_run_is_named(manifest, tmp_path):
    run = mint(manifest, [], tmp_path)
    assert list(environment_changes(run)) == []
    facts = json.loads((run / "env.json").read_text())
    assert {"gpus", "cpu", "memory_bytes", "variables"} <= facts.keys()
    assert {"torch", "pydantic", "matplotlib"} <= facts["packages"].keys()
    facts["packages"]["torch"] = "1.0"
    facts["gpus"] = [{"name": "H200", "driver": "550", "memory": "1 MiB"}]
    (run / "env.json").write_text(json.dumps(facts))
    (run / "git.patch").write_text("+1\n")
    text = "\n".join(environment_changes(run))
    assert "torch 1.0 -> " in text
    assert "GPUs ['H200, driver 550'] -> " in text
    assert "uncommitted changes" in text
    (run / "env.json").unlink()
    assert "not there to be read" in next(environment_changes(run))
