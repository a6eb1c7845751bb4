"""Run directories: minted whole, found by what a user types, held by one worker."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from caramba.config.manifest import parse_manifest
from caramba.errors import CarambaError, ConfigError
from caramba.runs import (
    canonical_json,
    differences,
    find_unfinished_run,
    find_unmeasured_run,
    list_runs,
    lock,
    manifest_sha256,
    mint,
    minting,
    read_manifest,
    resolve_run,
)
from caramba.runs.environment import list_installed_packages
from caramba.runs.exit_codes import run_command
from caramba.runs.files import drop_mark, home, marks_of, remove_parts, whole_file, write_json
from caramba.runs.state import list_failed_benchmarks


@pytest.fixture(name="manifest")
def _manifest():
    layers = [{"type": "RMSNormLayer", "d_model": 8}]
    model = {
        "embedder": {"vocab_size": 300, "d_model": 8},
        "topology": {"type": "StackedTopology", "layers": layers},
    }
    groups = [{"name": "main", "data": {"type": "stdlib", "vocab_size": 300}}]
    return parse_manifest({"name": "demo", "model": model, "groups": groups})


def test_mint_writes_everything_that_a_run_starts_from(manifest, tmp_path):
    run = mint(manifest, ["model=tiny", "notes='a b'"], tmp_path)
    assert run.parent == tmp_path / "demo"
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", run.name)
    assert read_manifest(run) == manifest
    digest = hashlib.sha256((run / "manifest.json").read_bytes()).hexdigest()
    assert digest == manifest_sha256(manifest)
    assert run.name.endswith(digest[:8])
    assert (run / "overrides.txt").read_text() == "model=tiny\nnotes='a b'\n"
    environment = json.loads((run / "env.json").read_text())
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "torch" in environment["packages"]
    assert os.uname().nodename not in (run / "env.json").read_text().replace(environment["platform"], "")


def test_runs_of_one_second_never_share_a_directory(manifest, tmp_path):
    runs = [mint(manifest, [], tmp_path) for _ in range(4)]
    assert len(set(runs)) == 4
    assert list_runs(tmp_path) == runs


def test_the_git_state_is_kept(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "f.txt").write_text("one\n")
    for words in (["init", "-q"], ["add", "f.txt"], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *words], check=True, capture_output=True)
    (tmp_path / "f.txt").write_text("two\n")
    run = mint(manifest, [])
    assert "+two" in (run / "git.patch").read_text()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert json.loads((run / "env.json").read_text())["git_commit"] == commit
    assert stat.S_IMODE((run / "git.patch").stat().st_mode) == 0o600, "uncommitted changes may hold keys"
    monkeypatch.setenv("CARAMBA_GIT_PATCH", "off")
    without = mint(manifest, [])
    assert not (without / "git.patch").exists()
    assert json.loads((without / "env.json").read_text())["git_is_clean"] is False
    monkeypatch.setenv("CARAMBA_GIT_PATCH", "perhaps")
    with pytest.raises(ConfigError, match="CARAMBA_GIT_PATCH=perhaps: expected on or off"):
        mint(manifest, [])


def test_mint_git_patch_is_announced_once(manifest, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(minting, "git_patch", lambda: b"+key")
    minting._announce_once.cache_clear()
    runs = [mint(manifest, [], tmp_path) for _ in range(2)]
    assert [(run / "git.patch").read_bytes() for run in runs] == [b"+key"] * 2
    said = capsys.readouterr().err
    assert said.count("uncommitted changes of this git repository are stored in each run's git.patch") == 1
    assert "CARAMBA_GIT_PATCH=off leaves them out" in said


KILLED_START = """
import os, pathlib, signal, sys
from caramba.runs import minting, read_manifest
if sys.argv[3] != "none":
    def kill(file, *rest): os.kill(os.getpid(), signal.SIGKILL)
    setattr(minting, sys.argv[3], kill)
run = minting.mint(read_manifest(pathlib.Path(sys.argv[1])), ["old"], pathlib.Path(sys.argv[2]))
(run / "events.jsonl").write_text('{"time": 1, "event": "run_started"}\\n')
print(run, flush=True)
sys.stdin.read()
"""


def killed_start(file, root, at="none"):
    return subprocess.Popen(
        [sys.executable, "-c", KILLED_START, str(file), str(root), at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("at", ["write_whole", "write_json", "canonical_json", "none"])
def test_mint_leftover_of_a_killed_start_is_used_again(manifest, tmp_path, monkeypatch, at):
    """Trap: a launch that was killed before its plan left a folder, and the next one made another."""
    monkeypatch.setenv("CARAMBA_GIT_PATCH", "off")
    (tmp_path / "manifest.json").write_text(canonical_json(manifest))
    with killed_start(tmp_path / "manifest.json", tmp_path, at) as start:
        assert start.stdout is not None
        said = start.stdout.readline()
        if at == "none":  # It lives: its folder stays its own.
            other = mint(manifest, [], tmp_path)
            assert str(other) != said.strip()
            (other / "plan.json").write_text("{}")
            start.kill()
    (left,) = [run for run in (tmp_path / "demo").iterdir() if not (run / "plan.json").exists()]
    run = mint(manifest, ["new"], tmp_path)
    assert run == left
    assert sorted(file.name for file in run.iterdir()) == ["env.json", "manifest.json", "overrides.txt"]
    assert (run / "overrides.txt").read_text() == "new\n"


def test_remove_parts_leaves_every_other_file(tmp_path):
    """Trap: a run that was killed while it saved kept `.NAME.xxxx.part` for ever."""
    (tmp_path / "checkpoints").mkdir()
    for name in (
        ".lock",
        "a.part",
        "checkpoints/.a.state.pt.x1y2.part",
        "checkpoints/a.state.pt",
        ".b.json.z.part",
    ):
        (tmp_path / name).touch()
    remove_parts(tmp_path)
    left = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert left == [".lock", "a.part", "checkpoints/a.state.pt"]


def test_half_a_manifest_of_a_killed_start_is_no_run(manifest, tmp_path):
    start = tmp_path / "demo" / "20260101-000000-01234567"
    left = tmp_path / "left"
    with whole_file(start / "manifest.json") as part:
        shutil.copytree(start, left)  # as a kill here leaves it
        part.write_text("{}")
    shutil.rmtree(start)
    left.rename(start)
    assert [item.name for item in start.iterdir() if item.name.endswith(".part")]
    for folder in (tmp_path, tmp_path / "demo", start):
        assert minting.runs_below(folder) == []
    run = mint(manifest, [], tmp_path)
    for folder in (tmp_path, run.parent, run):
        assert minting.runs_below(folder) == [run]


@pytest.mark.parametrize("name", ["plan.json", "sbatch.sh", "checkpoints"])
def test_mint_folder_with_other_files_is_no_leftover(manifest, tmp_path, name):
    (tmp_path / "manifest.json").write_text(canonical_json(manifest))
    with killed_start(tmp_path / "manifest.json", tmp_path) as start:
        assert start.stdout is not None
        left = Path(start.stdout.readline().strip())
        start.kill()
    (left / name).touch()
    assert mint(manifest, [], tmp_path) != left
    assert (left / name).exists()


def test_mint_leftover_whose_worker_still_starts_stays(manifest, tmp_path):
    """The mark is inherited: a front end that is killed leaves a worker that has not locked its run yet."""
    run = mint(manifest, [], tmp_path)
    worker = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=marks_of(run)
    )
    drop_mark(run)
    other = mint(manifest, [], tmp_path)
    assert other != run
    worker.communicate()
    assert mint(manifest, [], tmp_path) == run


def test_no_half_made_directory_is_left(manifest, tmp_path):
    (tmp_path / "demo").write_text("a file where the folder should be")
    with pytest.raises(CarambaError, match="cannot make a run directory"):
        mint(manifest, [], tmp_path)
    (tmp_path / "demo").unlink()

    def overrides():
        yield "a=1"
        raise OSError(28, "No space left on device")

    with pytest.raises(CarambaError, match="No space left on device; free space"):
        mint(manifest, overrides(), tmp_path)
    assert list((tmp_path / "demo").iterdir()) == []


def test_runs_are_found_by_what_people_type(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = mint(manifest, []), mint(manifest, [])
    assert resolve_run("latest") == second
    assert resolve_run("runs/demo") == second
    assert resolve_run("demo") == second
    assert resolve_run(str(first)) == first
    assert resolve_run(f"demo/{first.name}") == first
    assert resolve_run(str(first / "manifest.json")) == first
    with pytest.raises(ConfigError, match=r"runs/dem: no run there .*did you mean 'demo'"):
        resolve_run("runs/dem")
    monkeypatch.chdir(first)
    with pytest.raises(ConfigError, match="got '' for a run"):  # a variable of a shell that is not set
        resolve_run("")
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(ConfigError, match="latest: there are no runs under"):
        resolve_run("latest")


def test_a_second_worker_is_refused_with_the_first_ones_number(tmp_path):
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib\nfrom caramba.runs import lock\n"
            f"with lock(pathlib.Path({str(tmp_path)!r})):\n print('held', flush=True)\n sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=rf"process {child.pid} is running this run"), lock(tmp_path):
        pass
    child.kill()
    child.communicate()
    with lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_changed_manifest_file_is_a_clear_error(manifest, tmp_path):
    run = mint(manifest, [], tmp_path)
    text = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match=r"manifest.json: not JSON"):
        read_manifest(run)
    (run / "manifest.json").write_text(text.replace('"notes"', '"nots"'))
    with pytest.raises(ConfigError, match=r"manifest.json: nots: unknown key; did you mean 'notes'"):
        read_manifest(run)
    with pytest.raises(ConfigError, match="cannot read the manifest of a run"):
        read_manifest(tmp_path / "nowhere")


def test_differences_name_leaves():
    assert list(differences({"a": [1, {"b": 2}], "c": 1}, {"a": [1, {"b": 3}], "d": [1]})) == [
        "a[1].b: 2 -> 3",
        "c: 1 -> null",
        "d: null -> [1]",
    ]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("x: bad"), 2, "error: x: bad"),
        (CarambaError("broke"), 1, "error: broke"),
        (RuntimeError("boom"), 1, "failed: RuntimeError: boom (--debug shows the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_ending_has_its_status(error, status, text, capsys):
    def command() -> int:
        raise error

    assert run_command(command) == status
    out = capsys.readouterr()
    assert out.err.strip() == text
    if not isinstance(error, KeyboardInterrupt):
        assert run_command(command, is_debug=True) == status
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "value", "fail_fast", "expected"),
    [
        ("MemoryError: no room", 1.0, True, True),
        (None, 1.0, True, False),  # what failed is not known
        ("MemoryError: no room", 9.0, False, True),
        ("MemoryError: no room", 9.0, True, False),  # the verification ended it
    ],
)
def test_what_a_run_lacks_is_told_from_its_result(tmp_path, error, value, fail_fast, expected):
    check = {"name": "ppl_ratio", "value": value, "bound": 2.0, "unit": "", "is_minimum": False}
    verdict = {"type": "fidelity", "run_id": "look", "checks": [check], "fail_fast": fail_fast, "cases": []}
    result = {"status": "failed", "benchmarks": [{"id": "a", "error": error}], "verdicts": [verdict]}
    write_json(tmp_path / "result.json", result)
    assert list_failed_benchmarks(tmp_path) == (("a",) if expected else ())
    folder = tmp_path / "groups" / "main"
    folder.mkdir(parents=True)
    write_json(folder / "result.json", result)
    write_json(tmp_path / "result.json", {"status": "failed", "groups": ["main"]})
    assert list_failed_benchmarks(tmp_path) == (("a",) if expected else ())


def test_the_newest_result_of_a_manifest_says_whether_benchmarks_are_left(manifest, tmp_path):
    """Trap: a run that was made whole elsewhere is not gone back behind, and a ladder without its model is no work."""
    ladder = {"id": "ladder", "config": {"type": "ladder"}}
    group = manifest.groups[0].model_dump(mode="json") | {"benchmarks": [ladder]}
    manifest = parse_manifest(manifest.model_dump(mode="json") | {"groups": [group]})

    def ended(status, *failed):
        run = mint(manifest, [], tmp_path)
        benchmarks = [{"id": name, "error": "MemoryError: no room"} for name in failed]
        write_json(run / "result.json", {"status": status, "benchmarks": benchmarks, "verdicts": []})
        return run

    assert find_unmeasured_run(manifest, tmp_path) is None
    run = ended("failed", "ladder", "ppl", "ladder.bf16", "ppl")
    assert find_unmeasured_run(manifest, tmp_path) == (run, ("ladder.bf16", "ppl"))
    assert find_unfinished_run(manifest, tmp_path) is None
    assert find_unmeasured_run(manifest.model_copy(update={"seed": 9}), tmp_path) is None
    with lock(run):
        assert find_unmeasured_run(manifest, tmp_path) is None
    mint(manifest, [], tmp_path)
    assert find_unmeasured_run(manifest, tmp_path) == (run, ("ladder.bf16", "ppl")), (
        "a run without a result is no run yet"
    )
    stage = run / "stages" / "00-fit.json"
    stage.parent.mkdir()
    write_json(stage, {"phase": {"checkpoint": "checkpoints/fit.safetensors"}})
    assert find_unmeasured_run(manifest, tmp_path) is None, "its weights are gone: a resume would be refused"
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "fit.safetensors").touch()
    assert find_unmeasured_run(manifest, tmp_path) == (run, ("ladder.bf16", "ppl"))
    anew = manifest.model_copy(update={"resume": "never"})
    write_json(mint(anew, [], tmp_path) / "result.json", {"status": "finished", "benchmarks": [], "verdicts": []})
    assert find_unmeasured_run(manifest, tmp_path) is None, "resume=never is the same experiment, whole since"
    ended("failed", "ladder")
    assert find_unmeasured_run(manifest, tmp_path) is None


def test_a_folder_of_caches_that_cannot_be_written_is_named_with_its_variable(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "file" / "caches"))
    assert run_command(lambda: write_json(home() / "x.json", 1) or 0) == 2
    assert "set CARAMBA_HOME to a folder that can be written" in capsys.readouterr().err
    assert run_command(lambda: write_json(tmp_path / "file" / "other" / "x.json", 1) or 0) == 1


def test_installed_packages_are_those_of_their_metadata() -> None:
    whole = {str(item.metadata["Name"]): item.version for item in importlib.metadata.distributions()}
    assert list_installed_packages() == whole
    assert whole["torch"]
