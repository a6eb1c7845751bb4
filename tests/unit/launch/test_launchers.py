"""What the launchers refuse before anything is written, the script that SLURM gets, and which rank failed first."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from caramba.cli import main
from caramba.config.parallel import ClusterConfig, LauncherConfig
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from caramba.launch import run
from caramba.launch.commands import rerun
from caramba.launch.freeze import freeze
from caramba.launch.launchers import torchrun
from caramba.launch.launchers.rendezvous import refuse_launcher, shared_run_dir
from caramba.launch.launchers.slurm import _ranges, array_script, run_script
from caramba.launch.launchers.torchrun import SignalForwarder, check_torchrun, ranks_per_node
from caramba.launch.sweeps.runner import refuse_unlike
from caramba.runs import exit_codes, mint
from caramba.runs.events import append_event
from caramba.runs.files import write_json
from caramba.runs.sweeps import list_sweeps

WORDS = ("model=tiny", "train=pretrain", "benchmark=none", "device=cpu")


@pytest.fixture(scope="module")
def manifest():
    return freeze(list(WORDS)).manifest


def launched(manifest, parallel=None, cluster=None, **launcher):
    parallel = manifest.parallel.model_copy(update=parallel or {})
    cluster = ClusterConfig(**(cluster or {}))
    return manifest.model_copy(
        update={"launcher": LauncherConfig(**launcher), "parallel": parallel, "cluster": cluster}
    )


@pytest.mark.parametrize(
    ("schema", "plain", "text"),
    [
        (LauncherConfig, {"type": "torchrun", "nodes": 2}, "nodes=2 has no meaning for launcher=torchrun"),
        (LauncherConfig, {"type": "process", "requeue": True}, "add launcher=slurm, or leave it out"),
        (LauncherConfig, {"type": "slurm", "on_failure": "stop"}, "whose points are all queued at once"),
        (ClusterConfig, {"partition": "a b"}, "partition"),
        (ClusterConfig, {"modules": ["cuda;rm"]}, "modules"),
        (ClusterConfig, {"modules": ["cuda&rm"]}, "modules"),
        (ClusterConfig, {"modules": ["cuda|rm"]}, "modules"),
        (ClusterConfig, {"modules": ["cuda*"]}, "modules"),
        (ClusterConfig, {"account": "$(rm)"}, "account"),
        (ClusterConfig, {"time": "soon"}, "time"),
        (ClusterConfig, {"time": 14400}, "got the number 14400; write it as HH:MM:SS"),
        (ClusterConfig, {"options": ["--array=1-9"]}, "--array is set by launcher.n_jobs"),
        (ClusterConfig, {"options": ["--exclusive\nrm"]}, "options"),
        (ClusterConfig, {"env": {"A-B": "x"}}, "'A-B' is not the name of a variable"),
        (ClusterConfig, {"env": {"A": "x\nrm"}}, "a line break, which a script's line cannot"),
        (ClusterConfig, {"partitoin": "x"}, "did you mean 'partition'"),
    ],
)
def test_what_would_be_ignored_or_run_in_the_script_is_refused(schema, plain, text):
    with pytest.raises(ConfigError, match=text):
        parse_as(schema, plain)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["launcher=slurm", "cluster=example"],
            "sbatch is not on PATH, so this is no machine of a SLURM cluster",
        ),
        (
            ["launcher=process", "parallel=ddp"],
            "parallel=ddp is a run of several ranks; use launcher=torchrun",
        ),
        (["hydra/launcher=submitit_slurm"], "launcher=slurm submits arrays"),
    ],
)
def test_mistakes_write_nothing(tmp_path, monkeypatch, capsys, words, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", *WORDS, *words]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ranks_are_what_parallel_and_the_nodes_make(manifest, monkeypatch):
    ddp = {"strategy": "ddp", "dp": 8}
    assert ranks_per_node(launched(manifest)) == 1
    with pytest.raises(ConfigError, match=r"2 ranks on 1 node\(s\), and parallel.strategy=single is one process"):
        ranks_per_node(launched(manifest, type="torchrun", nproc_per_node=2))
    assert ranks_per_node(launched(manifest, ddp, type="slurm", nodes=2)) == 4
    with pytest.raises(ConfigError, match=r"dp=8 x tp=1 are 8 ranks, and launcher.nodes=3"):
        ranks_per_node(launched(manifest, ddp, type="slurm", nodes=3))
    with pytest.raises(ConfigError, match=r"nproc_per_node=2 do not make them"):
        ranks_per_node(launched(manifest, ddp, type="torchrun", nproc_per_node=2))
    stages = {"strategy": "pipeline", "pp": 4}
    assert ranks_per_node(launched(manifest, stages, type="slurm", nodes=2)) == 2
    with pytest.raises(ConfigError, match=r"parallel.pp=4 are 4 ranks, and launcher.nodes=3"):
        ranks_per_node(launched(manifest, stages, type="slurm", nodes=3))
    open_size = {"strategy": "ddp", "dp": "auto"}
    assert ranks_per_node(launched(manifest, open_size, type="torchrun", nproc_per_node=3)) == 3
    on_node = {"strategy": "fsdp2_tp", "tp": 2}
    for gpus in (4, "h100:5"):
        job = launched(manifest, on_node, {"gpus": gpus}, type="slurm").model_copy(update={"device": "auto"})
        assert ranks_per_node(job) == 4, "of the node, not of the machine that submits"
    for gpus in (None, 1, "h100"):
        with pytest.raises(ConfigError, match=rf"cluster.gpus={gpus} with device=auto does not say how many"):
            ranks_per_node(
                launched(manifest, on_node, {"gpus": gpus}, type="slurm").model_copy(update={"device": "auto"})
            )
    assert ranks_per_node(launched(manifest, open_size, type="slurm", nproc_per_node=3)) == 3
    on_gpus = launched(manifest, ddp, type="torchrun", devices=(0, 1)).model_copy(update={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"8 ranks and 2 GPUs \(0, 1\)"):
        check_torchrun(on_gpus)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "16")
        check_torchrun(on_gpus)  # 8 of them on this node, the rest on another: who joins them counts
    monkeypatch.setattr(torchrun.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"this PyTorch has no torch.distributed.run"):
        check_torchrun(launched(manifest, type="torchrun"))


def test_the_script_of_a_job_is_plain_and_asks_for_what_ranks_need(manifest, tmp_path):
    """Traps: tasks that are not the ranks of a node, GPUs hidden from tasks, a worker that composes again."""
    site = {
        "partition": "gpu",
        "time": "1-00:00:00",
        "gpus": "h100:4",
        "cpus_per_task": 8,
        "modules": ("cuda/12.8",),
        "env": {"NOTE": "it's $HOME; rm -rf /"},
        "options": ("--exclusive",),
    }
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    asked = launched(manifest, {"strategy": "ddp", "dp": 8}, site, type="slurm", nodes=2, signal_s=60)
    text = run_script(run_dir, asked, ["--quiet"])
    lines = text.splitlines()
    options = [shlex.split(line, comments=False)[1] for line in lines if line.startswith("#SBATCH ")]
    assert {
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=h100:4",
        "--cpus-per-task=8",
        "--requeue",
    } <= {*options}
    assert {"--signal=USR2@60", "--open-mode=append", "--partition=gpu", "--exclusive"} <= {*options}
    assert not [option for option in options if option.startswith("--gpus-per-task")]
    (step,) = [line for line in lines if line.startswith("srun ")]
    words = shlex.split(step)
    assert words[words.index("-m") :] == ["-m", "caramba.worker", "$run/manifest.json", "--quiet"]
    assert "module load cuda/12.8" in lines
    script = tmp_path / "sbatch.sh"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).stderr == b""
    exported = "\n".join(line for line in lines if line.startswith("export NOTE"))
    done = subprocess.run(["bash", "-c", f'{exported}; echo "$NOTE"'], capture_output=True, text=True)
    assert done.stdout == "it's $HOME; rm -rf /\n", "a site's values are data"
    with pytest.raises(ConfigError, match=r"a\\nrm.* holds a line break, which a line of SLURM's script cannot"):
        run_script(tmp_path / "a\nrm", asked, [])
    single = run_script(run_dir, launched(manifest, type="slurm", requeue=False), [])
    assert "scontrol requeue" not in single
    assert "--no-requeue" in single
    assert "gpus" not in single, "device=cpu asks for none"
    anywhere = launched(manifest, type="slurm").model_copy(update={"device": "auto"})
    assert "--gpus-per-node=1" in run_script(run_dir, anywhere, [])


def test_an_array_runs_the_line_of_its_task(manifest, tmp_path):
    text = array_script(tmp_path, launched(manifest, type="slurm", n_jobs=2), [], [0, 1, 2, 5])
    assert "#SBATCH --array=0-2,5%2" in text
    (tmp_path / "runs.txt").write_text("/r/0\n/r/1\n\n\n\n/r/5\n")
    (select,) = [line for line in text.splitlines() if line.startswith("run=")]
    done = subprocess.run(
        ["bash", "-c", f'SLURM_ARRAY_TASK_ID=5; {select}; echo "$run"'], capture_output=True, text=True
    )
    assert done.stdout == "/r/5\n"
    assert _ranges([3]) == "3"


def test_a_script_is_written_for_later(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/bin")
    assert main(["-m", *WORDS, "launcher=slurm_sbatch_only", "seed=1,2"]) == 0
    (folder,) = list_sweeps(tmp_path / "runs")
    assert f"submit with: sbatch {folder}/sbatch.sh" in capsys.readouterr().out
    assert not (folder / "slurm.json").exists()
    assert "--array=0-1" in (folder / "sbatch.sh").read_text()
    listed = (folder / "runs.txt").read_text().splitlines()
    assert [json.loads((tmp_path / run / "manifest.json").read_text())["seed"] for run in listed] == [1, 2]
    assert main(["status"]) == 0
    assert capsys.readouterr().out.count(" waiting ") == 2


def test_what_failed_and_is_queued_again_waits(tmp_path, monkeypatch, capsys):
    """sbatch and squeue are scripts: what is tested is what is said of runs by their files and the queue."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()

    def program(name, text):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    def listed():
        capsys.readouterr()
        assert main(["status", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        (sweep,) = said["sweeps"]
        counts = {key: value for key, value in sweep.items() if key not in ("sweep", "points")}
        return counts, [(row["state"], row["error"], row["job"]) for row in said["runs"]]

    program("sbatch", "echo 12")
    program("squeue", "true")
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")
    assert main(["-m", *WORDS, "launcher=slurm", "seed=1,2"]) == 0
    (folder,) = list_sweeps(tmp_path / "runs")
    runs = [tmp_path / run for run in (folder / "runs.txt").read_text().splitlines()]
    for made, status in zip(runs, ("finished", "failed"), strict=True):
        append_event(made, "run_started")
        append_event(made, f"run_{status}", **({"error": "benchmark ppl"} if status == "failed" else {}))
        benchmarks = [{"id": "ppl", "error": "MemoryError" if status == "failed" else None}]
        write_json(made / "result.json", {"status": status, "benchmarks": benchmarks, "verdicts": []})
    done = ("finished", None, None)
    assert listed() == ({"finished": 1, "failed": 1}, [done, ("failed", "benchmark ppl", None)])

    program("squeue", "echo '12_1|PENDING|Resources'")
    program("sbatch", "exit 1")
    assert main(["resume", str(folder)]) == 2
    program("squeue", "true")
    assert listed()[1][1][0] == "failed", "sbatch refused it"
    program("sbatch", "echo 13")
    assert main(["resume", str(folder)]) == 0
    program("squeue", "echo '13_1|PENDING|Resources'")
    waiting = ("waiting", None, "SLURM job 13_1 PENDING (Resources)")
    assert listed() == ({"finished": 1, "waiting": 1}, [done, waiting])
    assert (folder / "runs.txt").read_text().splitlines() == ["", str(runs[1])]
    program("squeue", "echo '13_1|CANCELLED|None'")
    assert listed()[1][1][:2] == ("failed", "benchmark ppl"), "it waits for nothing"
    append_event(runs[1], "run_started")
    program("squeue", "echo '13_1|RUNNING|None'")
    assert listed()[1][1][0] == "running"
    append_event(runs[1], "run_failed", error="benchmark ppl")
    assert listed() == ({"finished": 1, "failed": 1}, [done, ("failed", "benchmark ppl", None)])

    program("squeue", "true")
    assert main(["resume", str(runs[1])]) == 0
    program("squeue", "echo '13|PENDING|Resources'")
    assert listed()[0] == {"finished": 1, "waiting": 1}, "so does one that is submitted by itself"


def test_an_array_asks_for_the_same_for_every_point(manifest, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *WORDS, "launcher=slurm_sbatch_only", "cluster.mem=8G,16G"]) == 2
    assert 'asks for other things than the first (cluster.mem: "8G" -> "16G")' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    first = launched(manifest, {"strategy": "ddp", "dp": 1}, type="slurm")
    refuse_unlike(first, first.model_copy(update={"name": "another", "seed": 2}), "seed=2")
    for other, text in (
        (launched(manifest, {"strategy": "ddp", "dp": 2}, type="slurm"), r"\(parallel.dp: 1 -> 2\)"),
        (launched(manifest, {"strategy": "ddp", "dp": 1}), 'launcher.type: "slurm" -> "inline"'),
        (first.model_copy(update={"device": "cuda"}), 'device: "cpu" -> "cuda"'),
    ):
        with pytest.raises(ConfigError, match=text):
            refuse_unlike(first, other, "a=b")


def test_under_torchrun_no_second_launcher_and_no_store_but_torchruns(manifest, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"launcher=slurm: torchrun has started these ranks"):
        refuse_launcher(launched(manifest, type="slurm"))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR or MASTER_PORT is not"):
        shared_run_dir(lambda: pytest.fail("only rank 0 composes"))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="were not started by torchrun, whose agent keeps"):
        shared_run_dir(lambda: pytest.fail("only rank 0 composes"))


def test_ranks_that_run_a_manifest_again_share_a_directory(manifest, tmp_path, monkeypatch):
    """Trap: a directory for each rank. The store is torchrun's own, and the worker only says what it was given."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    monkeypatch.chdir(tmp_path)
    original = mint(manifest, WORDS)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = []
    for module in (run, rerun):
        monkeypatch.setattr(module, "run_inline", lambda file, flags: given.append(file) or 0)
    values = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in {**values, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for number in ("0", "1"):
        monkeypatch.setenv("RANK", number)
        assert main(["rerun", str(original)]) == 0
    assert len({*given}) == 1
    assert given[0].read_bytes() == (original / "manifest.json").read_bytes()
    assert len(list((tmp_path / "runs").glob("*/*"))) == 2


@pytest.fixture
def hears_interrupts():
    """What a shell does to SIGINT for tests in its background is undone."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_a_signal_that_wants_the_place_back_is_no_termination(tmp_path):
    """The ranks are told by SIGTERM either way; a system starts again what ends with 75."""

    def ended(*numbers):
        def start():
            for number in numbers:  # the agent is not known yet
                os.kill(os.getpid(), number)
            return subprocess.Popen(["sleep", "60"])

        with SignalForwarder() as forwarder:
            return torchrun._ending(tmp_path, forwarder.run(start), forwarder)

    before = signal.getsignal(signal.SIGTERM)
    assert ended(signal.SIGUSR2) == 75
    assert ended(signal.SIGTERM) == ended(signal.SIGUSR1, signal.SIGTERM) == 143
    assert ended(signal.SIGINT) == 130
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("hears_interrupts")
def test_an_agent_that_does_not_stop_is_killed_by_a_second_interrupt(monkeypatch):
    monkeypatch.setattr(exit_codes, "SAME_PRESS_S", 0.0)
    program = "import signal, time; signal.signal(signal.SIGINT, lambda *_: None); print(flush=True); time.sleep(600)"
    with (
        SignalForwarder() as forwarder,
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as agent,
    ):

        def start():
            assert agent.stdout is not None
            agent.stdout.readline()  # it has become deaf
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return agent

        assert forwarder.run(start) == -signal.SIGINT
        assert agent.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("status", "ends"), [(1, 1), (79, 143)])
def test_ranks_that_fail_as_a_signal_comes_are_not_started_again(status, ends, manifest, tmp_path, monkeypatch):
    attempts = []

    def attempt(*_):
        attempts.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        return status

    monkeypatch.setattr(torchrun, "_attempt", attempt)
    assert torchrun.run_torchrun(tmp_path, launched(manifest, type="torchrun", max_restarts=3), []) == ends
    assert len(attempts) == 1
    status = 0
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        torchrun.run_torchrun(tmp_path, launched(manifest, type="torchrun"), [])


@pytest.mark.parametrize(
    ("ran_out", "status", "said"),
    [
        (("a", "b"), 0, None),  # of every phase one reduction
        (("a", "a"), 1, "a: memory ran out again, with the smaller batch: not started again"),
        (("a", "b", "a"), 1, "a: memory ran out again"),
        ((None, None), 1, "\nmemory ran out again"),  # no plan tells which
    ],
)
def test_ranks_are_started_again_once_for_the_smaller_batch_of_a_phase(
    ran_out, status, said, manifest, tmp_path, monkeypatch, capfd
):
    """Of what ranks do plan.json and an exit status are told, which stand in for them here."""
    plans, size, left = {"done": planned(8, "manifest")}, 64, list(ran_out)

    def attempt(*_):
        nonlocal size
        if not left:
            return 0
        phase = left.pop(0)
        if phase is not None:
            size //= 2
            plans[phase] = planned(size, f"reduced: out of memory; {size} x 2 sequences")
            (tmp_path / "plan.json").write_text(json.dumps(plans))
        return 79

    (tmp_path / "plan.json").write_text(json.dumps(plans))
    monkeypatch.setattr(torchrun, "_attempt", attempt)
    assert torchrun.run_torchrun(tmp_path, launched(manifest, type="torchrun"), []) == status
    text = capfd.readouterr().err
    assert (said or "") in text
    assert ("memory ran out again" in text) == (said is not None)
    assert text.count("starting all ranks again with the smaller batch") == len(set(ran_out))


def planned(size, reason):
    return {"signature": "", "facts": {}, "decisions": {"batch_size": {"value": size, "reason": reason}}}


def test_the_first_failure_is_the_killed_rank_or_the_first_to_say_so(tmp_path):
    from caramba.launch.launchers.elastic import first_failure

    def failure(rank, code, said=None, noticed=100):
        file = tmp_path / f"{rank}.json"
        if said is not None:
            file.write_text(json.dumps({"time": said}))
        return SimpleNamespace(exitcode=code, error_file=str(file), timestamp=noticed)

    followed = {0: failure(0, 1, 100.2), 1: failure(1, -9, noticed=101), 2: failure(2, -15, noticed=99)}
    assert first_failure(followed) == {"rank": 1, "exit_status": -9, "ranks_failed": [0, 1, 2]}
    said = {0: failure(3, 1, 100.7), 1: failure(4, 2, 100.3)}
    assert first_failure(said)["rank"] == 1
    hung = {0: failure(5, -9, noticed=130), 1: failure(6, 2, 100.3), 2: failure(7, 143, noticed=100)}
    assert first_failure(hung)["exit_status"] == 2, "the agent kills what hangs when another has failed"
