"""Autotune decode attention: time tile and split configs on caches larger than the device's L2."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

import torch

from caramba.cache.view import ZERO_WIDTH, zero_keys
from caramba.console import logger
from caramba.lower.tune.timing import Timed, time_interleaved
from caramba.ops.dba_decode import ZEROS, StoredStream, reference_dba_decode
from caramba.ops.formats import STORED, quantize

# Copies of a cache are read in turn until they fill this, over three times an L2 cache.
COLD_BYTES = 200 * 10**6
MOST_ERROR = 0.02  # relative error of a config against the reference
PROBE_TOKENS = 700
MOST_BYTES = 0.3  # of a GPU's free memory
TAIL = 128
NUMBERS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Bytes an element.
WEIGHT = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "q8_0": 1.0625, "q4_0": 0.5625, "nf4": 0.5625, ZEROS: 0.0}


@dataclass(frozen=True)
class DecodeCase:
    """A decode step to tune: formats and widths of semantic and geometric keys and, unless latent, of values.

    With quantised keys of plain attention the geometric ones are `ZEROS`.
    """

    kinds: tuple[str, ...]
    dims: tuple[int, int, int]
    batch: int
    tokens: int
    n_heads: int = 32
    n_kv_heads: int = 1

    @property
    def bytes(self) -> int:
        """What the step reads at least."""
        rows = self.batch * self.tokens * self.n_kv_heads
        return round(rows * sum(WEIGHT[k] * d for k, d in zip(self.kinds, self.dims, strict=False)))

    @property
    def name(self) -> str:
        dims = "+".join(str(d) for k, d in zip(self.kinds, self.dims, strict=False) if k != ZEROS)
        return f"{'/'.join(self.kinds)} {self.n_kv_heads} x {dims}, {self.batch} x {self.tokens}"


LAYOUTS = (((128, 64, 128), 1), ((128, 256, 128), 1), ((16, 32, 64), 8))
FORMATS = {
    "bf16": ("bf16",) * 3,
    "mixed": ("q4_0", "q8_0", "q4_0"),
    "q8_0": ("q8_0",) * 3,
    "q4_0": ("q4_0",) * 3,
}
ONE_PART = (("q8_0", ZEROS, "q8_0"), ("q4_0", ZEROS, "q4_0"))
SIZES = ((8, 32768), (1, 32768), (64, 4096), (1, 4096), (1, 131072), (8, 4096), (64, 32768))


def _cases(batch: int, tokens: int) -> Iterator[DecodeCase]:
    for kinds in FORMATS.values():
        for dims, n_kv_heads in LAYOUTS:
            yield DecodeCase(kinds[: 2 if n_kv_heads == 1 else 3], dims, batch, tokens, n_kv_heads=n_kv_heads)
    for kinds in ONE_PART:
        yield DecodeCase(kinds, (64, ZERO_WIDTH, 64), batch, tokens, n_kv_heads=8)


# Sizes outermost: a format that was measured at one size is read alike at the others.
CASES = tuple(case for size in SIZES for case in _cases(*size))


def tune_decode(device: torch.device, seconds: float, cases: Sequence[DecodeCase] = CASES) -> dict[str, dict[str, Any]]:
    """Return the fastest config of as many cases as the time allows, by the kernel's shape key.

    The first size of each format and layout gets the time first, because every config has to be compiled there; the
    others get the rest. A config is a mapping accepted by `choices` of the kernel's table.
    """
    ends = time.perf_counter() + seconds
    n_first = len({(case.kinds, case.dims, case.n_kv_heads) for case in cases})
    found: dict[str, dict[str, Any]] = {}
    for done in logger.progress(len(cases), "decode attention"):
        left = ends - time.perf_counter()
        if done and left <= 0:
            continue
        if device.type == "cuda" and cases[done].bytes > MOST_BYTES * torch.cuda.mem_get_info(device)[0]:
            continue
        sharing = (n_first if done < n_first else len(cases)) - done
        found |= tune_case(cases[done], device, max(0.0, left) / sharing)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if time.perf_counter() > ends and len(found) < len(cases):
        logger.warning(
            f"tune: {seconds:g} s were enough for {len(found)} of {len(cases)} shapes of decode attention; others of a "
            "measured format read their tiles alike, the rest keep what is shipped; raise --seconds for more"
        )
    return found


def tune_case(case: DecodeCase, device: torch.device, seconds: float) -> dict[str, dict[str, Any]]:
    """Time candidates of one case in turn, the rule's choice first, as many as the time allows."""
    launcher = import_module("caramba.kernels.triton.dba_decode")
    table = import_module("caramba.kernels.triton.dba_decode_table")
    copies = _copies(case, device)
    q_sem, q_geo, kinds, *streams = copies[0]
    shape = launcher.decode_shape(q_sem, q_geo, kinds, *streams[:3], case.tokens)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    in_cuda = device.type == "cuda" and import_module("caramba.kernels.cuda.nvrtc").version() is not None
    # Most promising first; each tile config, which has to be compiled, comes with all its split counts.
    configs = {str(index): config for index, config in enumerate(table.candidates(shape, processors, in_cuda))}
    timed = [Timed(name, _call(launcher.launch, config, copies)) for name, config in configs.items()]
    times, refused = time_interleaved(timed, device, seconds, least=1)
    if not times:
        logger.warning(f"tune: the decode kernel does not run {case.name}: {next(iter(refused.values()))}")
        return {}
    small, wanted = _probe(case, device)
    for name in sorted(times, key=lambda name: statistics.median(times[name])):
        error = _error(launcher.launch(configs[name], *small, [], 0), wanted)
        if error <= MOST_ERROR:
            return {shape.key: asdict(configs[name])}
        logger.warning(
            f"tune: {case.name}: {configs[name]} is off by {error:.1e} of what the reference gives and is not taken"
        )
    return {}


def _call(launch: Callable[..., object], way: object, copies: Sequence[Sequence[Any]]) -> Callable[[], object]:
    refusal: type[Exception] = import_module("triton.errors").TritonError

    def every_copy() -> None:
        try:
            for arguments in copies:
                launch(way, *arguments, [], 0)
        except refusal as error:  # more shared memory or registers than there are, say
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return every_copy


def _copies(case: DecodeCase, device: torch.device, n: int | None = None) -> list[list[Any]]:
    """Return the launcher's arguments up to `n_packed`, for n caches, or as many as do not stay in the device's own."""
    generator = torch.Generator(device).manual_seed(0)
    if n is None:
        n = max(1, min(160, -(-COLD_BYTES // case.bytes))) if device.type == "cuda" else 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    queries = [
        torch.randn(case.batch, case.n_heads, 1, d, device=device, dtype=dtype, generator=generator) * d**-0.5
        for d in case.dims[:2]
    ]
    seqlens = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    packed = seqlens[:1].clone() if any(kind in STORED for kind in case.kinds) else None
    return [[*queries, list(case.kinds), *_streams(case, device, generator), seqlens, packed] for _ in range(n)]


def _streams(case: DecodeCase, device: torch.device, generator: torch.Generator) -> list[list[torch.Tensor]]:
    streams: list[StoredStream] = []
    for kind, d in zip(case.kinds, case.dims, strict=False):
        streams.append(zero_keys(streams[0], d) if kind == ZEROS else _stored(case, kind, d, device, generator))
    return [stream.tensors for stream in streams] + [[]] * (3 - len(streams))


def _probe(case: DecodeCase, device: torch.device) -> tuple[list[Any], Sequence[torch.Tensor]]:
    """Return the launcher's arguments for few tokens of the case's form, some in tails, and the right results."""
    small = replace(case, batch=min(case.batch, 2), tokens=min(case.tokens, PROBE_TOKENS))
    q_sem, q_geo, kinds, *streams, seqlens, packed = _copies(small, device, 1)[0]
    seqlens[-1] = max(1, small.tokens - 3)
    if packed is not None:
        packed -= min(small.tokens // 2, TAIL // 2)
    k_sem, k_geo, v = streams
    wanted = reference_dba_decode(q_sem.float(), q_geo.float(), kinds, k_sem, k_geo, v, seqlens, packed, [], 0, 0, 0)
    return [q_sem, q_geo, kinds, *streams, seqlens, packed], wanted


def _error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the larger relative error of output and sums; of what is no number, infinity."""
    errors = [float((ours.float() - right).norm() / right.norm()) for ours, right in zip(found, wanted, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _stored(case: DecodeCase, kind: str, width: int, device: torch.device, generator: torch.Generator) -> StoredStream:
    """Draw a stream of `tokens` tokens as a cache of this format stores it."""
    shape = (case.batch, case.n_kv_heads, case.tokens, width)
    if kind in NUMBERS:
        return StoredStream(kind, torch.randn(shape, device=device, dtype=NUMBERS[kind], generator=generator))
    row = torch.randn(1, case.tokens, case.n_kv_heads * width, device=device, generator=generator)
    codes, scales = quantize(row, kind)
    # Every sequence gets a copy of one sequence's codes: the values do not change the time.
    codes, scales = (x.transpose(1, 2).expand(case.batch, *(-1,) * (x.dim() - 1)).contiguous() for x in (codes, scales))
    tail = torch.randn(
        (case.batch, case.n_kv_heads, TAIL, width), device=device, dtype=torch.bfloat16, generator=generator
    )
    return StoredStream(kind, codes, scales[..., None], tail)
