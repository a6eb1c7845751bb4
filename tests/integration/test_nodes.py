"""Two agents of torchrun, as on two nodes of one rank each: weights are sharded within a node, replicas between them."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import pytest
import torch

from caramba.data.checkpoint import load_tensors
from tests.integration.commands import SMALL, caramba, only_run, started
from tests.integration.test_parallel import free_port

WORDS = (
    *("model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu", *SMALL),
    *("train.steps=4", "train.eval_every=4", "train.block_size=32", "settings.instrument=none"),
)
LIMIT_S = 240.0


def val_loss(run: Path) -> float:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return next(event["values"]["val_loss"] for event in events if "val_loss" in event.get("values", {}))


def test_two_nodes_train_one_run_as_one_process(tmp_path: Path, cache: Path) -> None:
    """The agents share no standard input, rendezvous or folder but the one they launch from, as on a cluster."""
    nodes, one = tmp_path / "nodes", tmp_path / "one"
    for folder in (nodes, one):
        folder.mkdir()
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    words = ["--nnodes", "2", "--nproc-per-node", "1", *address]
    launch = ["-m", "caramba.launch", *WORDS, "parallel=fsdp2", "parallel.sharding=HYBRID_SHARD"]
    launch.append("train.batch_size=2")
    with contextlib.ExitStack() as agents:
        processes = [
            agents.enter_context(
                started([*words, "--node-rank", str(node), *launch], nodes, cache, "torch.distributed.run")
            )
            for node in (0, 1)
        ]
        try:
            done = caramba(["launch", *WORDS, "train.batch_size=4"], one, cache)
            assert done.returncode == 0, done.stdout + done.stderr
            statuses = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:  # asked to end: one that is killed leaves its rank behind
                    process.send_signal(signal.SIGTERM)
    assert statuses == [0, 0], (nodes / "log.txt").read_text()
    run, alone = only_run(nodes), only_run(one)
    assert val_loss(run) == pytest.approx(val_loss(alone), rel=1e-5)
    ours, theirs = (load_tensors(at / "checkpoints" / "pretrain.safetensors") for at in (run, alone))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-4)
