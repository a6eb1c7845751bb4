"""Two agents of torchrun, as on two nodes of one rank each: weights are sharded within a node, replicas between them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from caramba.data.checkpoint import load_tensors
from tests.integration.commands import SMALL, caramba, environment, only_run
from tests.integration.test_parallel import free_port

WORDS = (
    *("model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu", *SMALL),
    *("train.steps=4", "train.eval_every=4", "train.block_size=32", "settings.instrument=none"),
)
LIMIT_S = 240.0


def val_loss(run: Path) -> float:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return next(event["values"]["val_loss"] for event in events if "val_loss" in event.get("values", {}))


def end(processes: Sequence[subprocess.Popen[str]], grace_s: float = 20.0) -> None:
    """End the agents that still run. They are asked first, since one that is killed leaves its rank behind."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_agents_that_still_run_are_ended() -> None:
    stays, leaves = "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "pass"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import signal, time; {does}; print('up', flush=True); time.sleep(60)"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for does in (stays, leaves)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    end(processes, grace_s=0.2)
    assert [process.returncode for process in processes] == [-signal.SIGKILL, -signal.SIGTERM]


def test_two_nodes_train_one_run_as_one_process(tmp_path: Path, cache: Path) -> None:
    """The agents share no standard input, rendezvous or folder but the one they launch from, as on a cluster."""
    nodes, one = tmp_path / "nodes", tmp_path / "one"
    for folder in (nodes, one):
        folder.mkdir()
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
                *("--nproc-per-node", "1", *address, "-m", "caramba.launch", *WORDS),
                *("parallel=fsdp2", "parallel.sharding=HYBRID_SHARD", "train.batch_size=2"),
            ],
            cwd=nodes,
            env=environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        done = caramba(["launch", *WORDS, "train.batch_size=4"], one, cache)
        assert done.returncode == 0, done.stdout + done.stderr
        texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        end(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    run, alone = only_run(nodes), only_run(one)
    assert val_loss(run) == pytest.approx(val_loss(alone), rel=1e-5)
    ours, theirs = (load_tensors(at / "checkpoints" / "pretrain.safetensors") for at in (run, alone))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-4)
