"""The inference ladder: the same generation with one means of speed after the other switched on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba import kernels
from caramba.config.benchmark import InferenceLadderConfig, WeightFormat
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.evaluation.subject import Subjects
from caramba.infer import Generator
from caramba.infer.shared import BACKENDS, share_layers
from caramba.lower.quantize import format_refusal, quantise_weights
from caramba.model import Model, load_pretrained, save_model
from caramba.model.model import model_bytes
from caramba.model.parallel import tensor_parallel_plan
from caramba.ops import implementation
from caramba.ops.backend import REFERENCE, without_kernels
from caramba.result import Metric
from caramba.runs.exit_codes import end_now

RUNGS = {
    "eager_math": "eager, math SDPA",
    "flash": "+ best SDPA and fused decode",
    "graphs": "+ captured, compiled step",
    "int8": "+ INT8 weights",
    "tp2": "+ tensor parallel over 2",
}
SHARED, N_RANKS = "tp2", 2
NO_GRAPHS = "CUDA graphs need a CUDA device, the models are on {device}"
NO_TP = "tensor parallelism over 2 needs 2 devices, this process sees {n}"


@dataclass(frozen=True)
class Rung:
    """One configuration of a model's generation."""

    name: str
    generator: Generator
    weight_bytes: int
    surroundings: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@contextlib.contextmanager
def math_attention():
    """Run attention by plain products and no kernel of ours: where the ladder starts."""
    with without_kernels(), sdpa_kernel(SDPBackend.MATH):
        yield


def inference_ladder(
    config: InferenceLadderConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Time every model's decode on every rung; a rung that the device lacks is a row with the reason.

    Rungs take turns within a repetition; `tp2`, which two processes of its own run with whatever else is on, comes
    after them. `latency_ms` is the time of a decode step, `tok_s` the new tokens of all rows per second of decode:
    medians of `timed_runs`, `std` their standard deviation; rows add p20 and p80, in what form the steps `ran`, and
    the bytes of weights, of one device's.
    """
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        missing = missing_rungs(subjects.device, model)
        here = [rung for rung in config.rungs if rung not in missing and rung != SHARED]
        rungs = _rungs(model, config, subjects.device, here)
        timed = _timed(rungs, config, subjects)
        facts = {rung.name: (rung.generator.stats.decode, rung.weight_bytes) for rung in rungs}
        # Steps that the device cannot run by itself, for this model, are no rung of their own.
        missing |= {
            rung.name: rung.generator.stats.not_compiled
            for rung in rungs
            if rung.name == "graphs" and rung.generator.stats.not_compiled is not None
        }
        if SHARED in config.rungs and SHARED not in missing:
            try:
                shared = time_on_ranks(model, shared_rung(model, config, subjects, is_int8="int8" not in missing))
            except ProcessException as error:  # the rungs of one device stand
                missing[SHARED] = f"a rank failed: {str(error).strip().splitlines()[-1]}"
                logger.error(f"{source}: {name}: {SHARED}: {missing[SHARED]}")
            else:
                timed[SHARED], facts[SHARED] = shared.timed, (shared.ran, shared.weight_bytes)
        first: float | None = None
        for rung in config.rungs:
            row: dict[str, Any] = {"model": name, "rung": rung, "what": RUNGS[rung]}
            if rung in missing:
                rows.append(row | {"skipped": missing[rung]})
                continue
            found = _summary(timed[rung], config.batch_size)
            first = first or found["tok_s"]
            row |= dict(zip(("ran", "weight_bytes"), facts[rung], strict=True))
            found["speed_up"] = found["tok_s"] / first
            rows.append(row | found)
            given = f"rung={rung},prompt={config.prompt_length},gen={config.new_tokens},batch={config.batch_size}"
            for key, unit in (("latency_ms", "ms"), ("tok_s", "tokens/s"), ("speed_up", "ratio")):
                place, std = f"inference_ladder.{name}.{key}@{given}", found.get(f"{key}_std")
                metrics.append(Metric(place, found[key], unit, found["runs"], std, source))
    return metrics, rows


def dtype_of_serving(model: Model, device: torch.device) -> torch.dtype:
    """Return the type that a model decodes in: bfloat16 for fp32 weights on CUDA, else its own."""
    own = model.embedder.token.weight.dtype
    return torch.bfloat16 if device.type == "cuda" and own is torch.float32 else own


def missing_rungs(device: torch.device, model: Model) -> dict[str, str]:
    """Return the rungs that a device or a model has not, with the reason."""
    found: dict[str, str] = {}
    reason = format_refusal(WeightFormat.INT8, device)
    if reason is not None:
        found["int8"] = reason
    if device.type != "cuda":
        found["graphs"] = NO_GRAPHS.format(device=device.type)
    n_devices = torch.cuda.device_count() if device.type == "cuda" else 1
    if n_devices < N_RANKS:
        return found | {SHARED: NO_TP.format(n=n_devices)}
    try:
        tensor_parallel_plan(model, N_RANKS)
    except ConfigError as error:
        found[SHARED] = str(error)
    return found


def shared_rung(model: Model, config: InferenceLadderConfig, subjects: Subjects, *, is_int8: bool) -> SharedRung:
    """Return what two ranks run: every means of speed of the rungs before that the device has."""
    device = subjects.device
    return SharedRung(
        device=device.type,
        dtype=str(dtype_of_serving(model, device)).removeprefix("torch."),
        kernels=kernels_in_use(device),
        is_int8=is_int8 and "int8" in config.rungs,
        prompts=_prompts(config, subjects),
        warmup_runs=config.warmup_runs,
        timed_runs=config.timed_runs,
        generate=_keys(config) | {"compiled": device.type == "cuda"},
    )


def _rungs(model: Model, config: InferenceLadderConfig, device: torch.device, names: list[str]) -> list[Rung]:
    on_cuda = device.type == "cuda"
    plain, dtype = model.eval(), dtype_of_serving(model, device)
    if plain.embedder.token.weight.dtype is not dtype:
        plain = copy.deepcopy(plain).to(dtype)
    values = _keys(config)
    size = model_bytes(plain)
    rungs: list[Rung] = []
    for name in names:
        if name == "eager_math":
            rungs.append(Rung(name, Generator(plain, compiled=False, **values), size, math_attention))
        elif name == "flash":
            rungs.append(Rung(name, Generator(plain, compiled=False, **values), size))
        elif name == "graphs":
            rungs.append(Rung(name, Generator(plain, compiled=True, **values), size))
        else:
            changed = copy.deepcopy(plain)
            done = quantise_weights(changed, WeightFormat.INT8)
            rungs.append(Rung(name, Generator(changed, compiled=on_cuda, **values), done.bytes_after))
    return rungs


def _keys(config: InferenceLadderConfig) -> dict[str, Any]:
    return {"max_new_tokens": config.new_tokens, "temperature": 0.0, "read_every": config.new_tokens}


def _prompts(config: InferenceLadderConfig, subjects: Subjects) -> list[list[int]]:
    source = torch.Generator().manual_seed(0)
    shape = (config.batch_size, config.prompt_length)
    return torch.randint(subjects.vocab_size, shape, generator=source).tolist()


def _timed(
    rungs: list[Rung], config: InferenceLadderConfig, subjects: Subjects
) -> dict[str, list[tuple[float, float]]]:
    """Return the prefill and step times, in seconds, of every rung's timed runs."""
    prompts = _prompts(config, subjects)
    timed: dict[str, list[tuple[float, float]]] = {rung.name: [] for rung in rungs}
    for repetition in range(config.warmup_runs + config.timed_runs):
        for rung in rungs:
            with rung.surroundings():
                rung.generator.generate(prompts)
            stats = rung.generator.stats
            if repetition >= config.warmup_runs:
                timed[rung.name].append((stats.prefill_s, stats.decode_s / stats.steps))
    return timed


def _summary(timed: list[tuple[float, float]], batch: int) -> dict[str, Any]:
    found: dict[str, Any] = {"runs": len(timed)}
    series = {
        "prefill_ms": [1000 * prefill for prefill, _ in timed],
        "latency_ms": [1000 * step for _, step in timed],
        "tok_s": [batch / step for _, step in timed],
    }
    for key, values in series.items():
        p20, p80 = (float(value) for value in np.percentile(values, [20, 80]))
        std = statistics.stdev(values) if len(values) > 1 else None
        found |= {key: statistics.median(values), f"{key}_p20": p20, f"{key}_p80": p80, f"{key}_std": std}
    return found


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
    return SharedTimes([(prefill, step) for prefill, step in found["timed"]], found["ran"], found["weight_bytes"])


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
