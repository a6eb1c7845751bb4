"""A whole run with device=mps, watched for what Apple's GPU would refuse: see tests/as_if_on_mps.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.artifacts import style
from caramba.cli import main
from tests.as_if_on_mps import Watch, as_if_on_mps
from tests.integration.commands import leave_blank


class _OutOfMemory(TorchDispatchMode):
    """Refuses one training step of two sequences with the words of torch's allocator on MPS: the first one after a
    state is saved, whatever planning has tried before."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.is_over = folder, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_step = func is torch.ops.aten.embedding.default and torch.is_grad_enabled() and len(args[1]) == 2
        if is_step and not self.is_over and any(self.folder.glob("runs/on_mps/2*/checkpoints/*.state.pt")):
            self.is_over = True
            raise RuntimeError(
                "MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB, max allowed: "
                "18.13 GB). Tried to allocate 256.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 "
                "to disable upper limit for memory allocations (may cause system failure)."
            )
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch]:
    """Return the folder of a shortened `make demo`, whose second step runs out of memory, and what was seen."""
    folder = tmp_path_factory.mktemp("demo")
    MPSAccelerator.is_available()  # as a run before this one in the same process has asked
    text = np.frombuffer(Path(__file__).read_bytes() * 4, dtype=np.uint8)
    np.save(folder / "tokens.npy", text.astype(np.uint16))
    words = (
        *("device=mps", "experiment=smoke", "logger.tensorboard=false", "name=on_mps", "--quiet"),
        *("data=tokens", f"data.path={folder / 'tokens.npy'}", "model.embedder.vocab_size=256"),
        *("model.teacher.manifest.embedder.vocab_size=256", "model.surgery.calibration_tokens=64"),
        *("train.block_size=16", "train.batch_size=2", "train.steps=2", "train.save_every=1"),
    )
    with pytest.MonkeyPatch.context() as patch, as_if_on_mps() as watch, _OutOfMemory(folder):
        patch.setenv("CARAMBA_HOME", str(folder / "home"))
        patch.chdir(folder)
        patch.setattr(style, "_saved", leave_blank)
        assert main(["launch", *words]) == 0
    (run,) = folder.glob("runs/on_mps/2*")
    return run, watch


def test_a_run_on_mps_makes_no_float64_pins_nothing_and_calls_nothing_of_cuda(
    demo: tuple[Path, Watch],
) -> None:
    _, watch = demo
    assert watch.findings == {}
    assert not MPSAccelerator.is_available() or torch.backends.mps.is_available(), "no later test is on MPS"
    for operator in ("mm", "rms_norm", "rms_norm_backward", "rope", "dba_decode", "_fused_adamw_"):
        assert watch.operators[operator] > 0, operator


def test_a_run_on_mps_plans_for_the_device(demo: tuple[Path, Watch]) -> None:
    run, _ = demo
    for phase in json.loads((run / "plan.json").read_text()).values():
        chosen = {key: decision["value"] for key, decision in phase["decisions"].items()}
        assert (chosen["device"], chosen["compile_model"], chosen["dtype"]) == ("mps", False, "bfloat16")
        assert chosen["kernels"]["dba_decode"] == chosen["kernels"]["rms_norm"] == "metal"
        assert chosen["kernels"]["quantize"] == "reference"


def test_memory_that_runs_out_on_mps_splits_the_batch_and_resumes_from_the_last_state(
    demo: tuple[Path, Watch],
) -> None:
    run, _ = demo
    plan = json.loads((run / "plan.json").read_text())
    sizes = ("batch_size", "gradient_accumulation_steps")
    assert [plan["pretrain"]["decisions"][size]["value"] for size in sizes] == [1, 2]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kinds = ("phase_started", "out_of_memory", "phase_finished")
    seen = [(x["event"], x.get("step", x.get("steps"))) for x in events if x["event"] in kinds]
    assert seen[:4] == [(kinds[0], 0), (kinds[1], 1), (kinds[0], 1), (kinds[2], 2)]


def _moved(device: str) -> Tensor:
    return torch.ones(3, 4).to(device)


WRONG: dict[str, Callable[[], object]] = {
    "float64 _to_copy": lambda: _moved("mps").double(),
    "float64 a tensor of the device": lambda: torch.ones(3, dtype=torch.float64, device="mps"),
    "two devices add": lambda: _moved("mps") + torch.ones(4),
    "generator of the CPU rand": lambda: torch.rand(3, generator=torch.Generator(), device="mps"),
    "pinned memory zeros": lambda: torch.zeros(3, pin_memory=True),
    "host access numpy": lambda: _moved("mps").numpy(),
}


@pytest.mark.parametrize("finding", WRONG)
def test_the_watch_sees_what_the_device_refuses(finding: str) -> None:
    with as_if_on_mps() as watch:
        try:
            WRONG[finding]()
        except RuntimeError:  # pinned memory, on a machine without an accelerator
            assert finding.startswith("pinned")
    assert [" ".join(found[:2]) for found in watch.findings] == [finding]


def test_the_watch_sees_a_call_of_cuda_from_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from caramba.runtime import release_memory

    with as_if_on_mps() as watch:
        release_memory()
        assert watch.findings == {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        release_memory()
    assert [found[:2] for found in watch.findings] == [("call of CUDA", "empty_cache")]


def test_the_watch_follows_devices() -> None:
    with as_if_on_mps() as watch:
        x = torch.randn(3, 4, device="mps", requires_grad=True)
        (x * _moved("mps")).sum().backward()
        assert x.grad is not None
        on_device = (x, x.grad, x + 1, x @ x.T, x.new_tensor([1.0]), x.to(torch.float16), x[0], x.detach())
        assert {str(y.device) for y in on_device} == {"mps:0"}
        on_host = (x.cpu(), x.to("cpu", torch.float16), torch.zeros_like(x, device="cpu"), torch.ones(2))
        assert {str(y.device) for y in on_host} == {"cpu"}
        assert x.cpu().double().to(torch.float32).to(x.device).is_mps
        module = torch.nn.Linear(4, 4).to("mps")
        assert module(x).is_mps
        assert module.to("cpu").weight.device.type == "cpu"
    assert watch.findings == {}
