"""The ladder's last rung: the same generation by two processes that share each layer, a device for each."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from caramba import kernels
from caramba.config.benchmark import WeightFormat
from caramba.console import logger
from caramba.infer import Generator
from caramba.infer.shared import BACKENDS, share_layers
from caramba.lower.quantize import quantise_weights
from caramba.model import Model, load_pretrained, save_model
from caramba.model.identity import model_bytes
from caramba.ops import implementation
from caramba.ops.backend import REFERENCE
from caramba.runs.exit_codes import end_now

WEIGHTS, TIMES = "model.safetensors", "times.json"
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class SharedRung:
    """How two ranks generate: the device, the type of the weights, and what else is switched on below this rung.

    `prompts` are generated from `warmup_runs` times, then `timed_runs` times.
    """

    device: str
    dtype: str
    kernels: str
    is_int8: bool
    prompts: Sequence[Sequence[int]]
    warmup_runs: int
    timed_runs: int
    generate: dict[str, Any]


@dataclass(frozen=True)
class SharedTimes:
    """Prefill and step times in seconds, how steps ran, and the bytes of weights that one rank reads."""

    timed: list[tuple[float, float]]
    ran: str
    weight_bytes: int


def time_on_ranks(model: Model, rung: SharedRung, n_ranks: int = 2) -> SharedTimes:
    """Time a model's generation in `n_ranks` processes, started here, that share it; they end with this call.

    Raises:
        torch.multiprocessing.ProcessRaisedException: what a rank raised.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(model, folder / WEIGHTS, role="student", phase="ladder", labels={})
        ranks: Any = spawn(_rank, (name, dataclasses.asdict(rung), n_ranks), nprocs=n_ranks, join=False)
        assert ranks is not None
        try:
            while not ranks.join():
                pass
        finally:  # stopped by a signal, this process would wait at its own end until they have timed all
            for process in ranks.processes:
                process.kill()
                process.join()
        found = json.loads((folder / TIMES).read_text())
    return SharedTimes(
        [(prefill, step) for prefill, step in found["timed"]], found["ran"], found["weight_bytes"]
    )


def kernels_in_use(device: torch.device) -> str:
    """Return the kernels policy that gives another process the implementations of this one."""
    return "reference" if implementation("dba_decode", device) == REFERENCE else "auto"


def _rank(rank: int, folder: str, values: dict[str, Any], n_ranks: int) -> None:
    rung = SharedRung(**values)
    logger.quiet = True
    device = torch.device(rung.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    kernels.load(device, "reference" if rung.kernels == "reference" else "auto")
    dist.init_process_group(
        BACKENDS[device.type],
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=n_ranks,
        timeout=TIMEOUT,
    )
    mesh = init_device_mesh(device.type, (n_ranks,), mesh_dim_names=("tp",))
    model, _ = load_pretrained(Path(folder, WEIGHTS), device=device, where="inference_ladder")
    model.to(getattr(torch, rung.dtype))
    share_layers(model, mesh)
    size = quantise_weights(model, WeightFormat.INT8).bytes_after if rung.is_int8 else model_bytes(model)
    generator = Generator(model, **rung.generate)
    timed: list[tuple[float, float]] = []
    for repetition in range(rung.warmup_runs + rung.timed_runs):
        dist.barrier()
        generator.generate(rung.prompts)
        if repetition >= rung.warmup_runs:
            timed.append((generator.stats.prefill_s, generator.stats.decode_s / generator.stats.steps))
    if rank == 0:
        found = {"timed": timed, "ran": generator.stats.decode, "weight_bytes": size}
        Path(folder, TIMES).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    end_now(0)
