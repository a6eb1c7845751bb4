"""Plans that are measured: a batch that fits a limit, replayed exactly, and what happens where memory runs out."""

from __future__ import annotations

import json
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch._dynamo.utils import counters

from caramba.config.model import ModelSpec
from caramba.launch.config_files import conf_root
from caramba.model import build_model
from caramba.model.topology import checkpoint_topology, compilable_regions
from caramba.runs.events import read_events
from tests.integration.commands import FORKS, SMALL, caramba, only_run

ONE_BLOCK = (
    "model=tiny",
    "train=pretrain",
    "benchmark=none",
    "verify=none",
    "model.topology.layers.0.repeat=1",
    *SMALL,
)
SHORT = (*ONE_BLOCK, "train.block_size=64", "train.steps=2", "logger.tensorboard=false")
ROOM = 440 * 2**20
"""Address space above that of the loaded libraries, whose size differs between machines."""


def limit(kept: Path) -> None:
    """Give a process ROOM, and each later one the same limit: their plans are for so much memory."""
    if not kept.exists():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        kept.write_text(str(pages * resource.getpagesize() + ROOM))
    resource.setrlimit(resource.RLIMIT_AS, (int(kept.read_text()),) * 2)


def plan_of(run: Path) -> dict[str, dict[str, object]]:
    return json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]


@pytest.mark.slow
def test_a_batch_that_fits_is_found_once_and_replayed(tmp_path: Path, cache: Path) -> None:
    run = partial(caramba, folder=tmp_path, cache=cache, preexec_fn=partial(limit, tmp_path / "limit"))
    words = (*SHORT, "train.batch_size=auto", "resume=never", "seed=5")
    first = run([*words, "plan=refresh"])
    assert first.returncode == 0, first.stderr
    assert "plan pretrain: batch 2, float32: " in first.stdout
    decisions = plan_of(only_run(tmp_path))
    size, measured = decisions["batch_size"]["value"], decisions["batch_size"]["measured"]
    assert size >= 8
    assert measured["peak_bytes"] <= measured["target_bytes"]
    again = run([*words, "train.lr=1e-3"])
    assert again.returncode == 0, again.stderr
    assert f"planned before: batch_size={size}" in again.stdout
    assert "plan pretrain: batch" not in again.stdout
    (new,) = set(tmp_path.glob("runs/*/*")) - {only_run_named(tmp_path, "refresh")}
    assert plan_of(new)["batch_size"] == decisions["batch_size"]


def only_run_named(folder: Path, plan: str) -> Path:
    (found,) = (
        run for run in folder.glob("runs/*/*") if json.loads((run / "manifest.json").read_text())["plan"] == plan
    )
    return found


MEMORY_SCHEMA = """
from typing import Literal
from caramba.config import CallbackConfig

class LessMemoryConfig(CallbackConfig):
    target = "less_memory:LessMemory"
    type: Literal["LessMemory"] = "LessMemory"
    step: int
    rank: int
"""
MEMORY_IMPL = """
import ctypes
import os
import resource
from pathlib import Path
from lightning.pytorch import Callback

class LessMemory(Callback):
    def __init__(self, config):
        self.step, self.rank = config.step, config.rank
        # What a step frees goes back to the system, so that the next one has to ask for it again.
        M_MMAP_THRESHOLD = -3
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != self.step or int(os.environ.get("RANK", "0")) != self.rank:
            return
        try:
            Path("limited").touch(exist_ok=False)
        except FileExistsError:
            return
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 256 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


def limited(step: int, rank: int, folder: Path) -> list[str]:
    """Return the words of a run whose address space ends 256 MB above what the process has at the start of a step: one
    of 381 sequences takes 420 MB, one of 127 takes 140 MB."""
    (folder / "less_memory_schema.py").write_text(MEMORY_SCHEMA)
    (folder / "less_memory.py").write_text(MEMORY_IMPL)
    callback = f"{{type: LessMemory, step: {step}, rank: {rank}}}"
    plugin = ("plugins=[less_memory_schema]", f"callbacks=[{callback}]")
    return [*SHORT, "train.batch_size=381", "device=cpu", *plugin]


@pytest.mark.slow
@pytest.mark.skipif(not FORKS, reason="sets a limit of address space")
def test_out_of_memory_is_caught_once_with_a_smaller_batch(tmp_path: Path, cache: Path) -> None:
    done = caramba(limited(0, 0, tmp_path), tmp_path, cache)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("out of memory at step 0 with batch_size=381") == 1
    decisions = plan_of(only_run(tmp_path))
    assert (decisions["batch_size"]["value"], decisions["gradient_accumulation_steps"]["value"]) == (127, 3)
    assert "127 x 3 sequences a step are as many as before" in decisions["batch_size"]["reason"]


@pytest.mark.slow
@pytest.mark.skipif(not FORKS, reason="sets a limit of address space")
@pytest.mark.parametrize("rank", [None, 1], ids=["alone", "one of two ranks"])
def test_memory_that_runs_out_within_a_phase_goes_on_from_its_saved_state(
    rank: int | None, tmp_path: Path, cache: Path
) -> None:
    words = [*limited(1, rank or 0, tmp_path), "train.save_every=1"]
    words += [] if rank is None else ["parallel=ddp", "parallel.dp=2", "launcher=torchrun"]
    done = caramba(words, tmp_path, cache)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    run = only_run(tmp_path)
    events = list(read_events(run))
    if rank is None:
        assert "out of memory at step 1 with batch_size=381" in text
        assert "continuing with batch_size=127 x 3" in text
        (ran_out,) = [event for event in events if event["event"] == "out_of_memory"]
        assert ran_out["step"] == 1
    else:
        assert "rank 1 failed first: it ended with exit status 79; the others were stopped" in text
        assert "rank 1 of 2: pretrain: out of memory at step 1 with batch_size=381" in text
        assert "the phase resumes from its last saved state with batch_size=127 x 3: caramba resume" in text
        assert text.count("starting all ranks again with the smaller batch") == 1
    decisions = plan_of(run)
    assert (decisions["batch_size"]["value"], decisions["gradient_accumulation_steps"]["value"]) == (127, 3)
    (phase,) = json.loads((run / "result.json").read_text())["phases"]
    assert (phase["steps"], phase["tokens"]) == (2, 2 * 381 * 64 * (1 if rank is None else 2))
    metrics = [event for event in events if event["event"] == "metrics"]
    assert metrics[-1]["step"] == 2
    assert len({(row["step"], *row["values"]) for row in metrics}) == len(metrics), "no step is on record twice"


def test_what_cannot_be_planned_is_refused(tmp_path: Path, cache: Path) -> None:
    done = caramba([*SHORT, "train.batch_size=auto", "plan=off"], tmp_path, cache)
    assert done.returncode == 2
    assert "batch_size=auto is found by measurement, which plan=off forbids" in done.stderr
    done = caramba([*SHORT, "train.batch_size=auto", "plan=nothing.json"], tmp_path, cache)
    assert done.returncode == 2
    assert "plan=nothing.json: no such file; give a plan.json, or auto, refresh or off" in done.stderr
    done = caramba([*SHORT, "plan=refrehs"], tmp_path, cache)  # whether or not there is anything to plan
    assert done.returncode == 2
    assert "plan=refrehs: no such file;" in done.stderr
    assert "did you mean 'refresh'?" in done.stderr
    folder = tmp_path / "none"
    done = caramba([*SHORT, "train.float8=rowwise", "device=cpu"], tmp_path, folder)
    assert done.returncode == 2
    assert "train.float8=rowwise: the device cpu supports float32, bfloat16, float16; remove float8" in done.stderr
    assert not folder.exists(), "refused before the data is read"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_compiled_parts_share_graphs_that_hold_their_recomputation(mode: str) -> None:
    plain = yaml.safe_load((conf_root() / "model" / "tiny.yaml").read_text())
    del plain["name"]
    plain["embedder"]["vocab_size"] = 64
    model = build_model(ModelSpec.model_validate_json(json.dumps(plain)), seed=1).train()
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = _gradients(model, tokens)
    parts = checkpoint_topology(model.topology, mode)
    assert compilable_regions(model.topology)[:4] == parts
    torch.compiler.reset()
    counters.clear()
    for part in parts:
        part.forward = torch.compile(part.forward, backend="aot_eager", fullgraph=True)
    found = _gradients(model, tokens)
    assert counters["stats"]["unique_graphs"] == 1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def _gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens).logsumexp(-1).mean().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.slow
def test_everything_is_planned_on_a_gpu(tmp_path: Path, cache: Path) -> None:
    auto = [f"train.{key}=auto" for key in ("batch_size", "compile_model", "activation_checkpointing", "num_workers")]
    done = caramba([*SHORT, *auto, "device=cuda", "train.steps=200"], tmp_path, cache)
    assert done.returncode == 0, done.stderr
    decisions = plan_of(only_run(tmp_path))
    measured = decisions["batch_size"]["measured"]
    assert measured["peak_bytes"] <= measured["target_bytes"]
    assert {"off.step_seconds", "default.step_seconds"} <= set(decisions["compile_model"]["measured"])
    assert decisions["dtype"]["measured"]["loss_drift"] < 0.05
    assert not list(tmp_path.glob("runs/*/*/checkpoints/*.state.pt"))
