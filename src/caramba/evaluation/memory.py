"""Bytes of caches, weights and the peak while a prompt is read, from tensors that were allocated."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from caramba.config.benchmark import MemoryBenchmarkConfig
from caramba.config.kvcache import KVCacheKind
from caramba.evaluation.subject import Subjects
from caramba.infer import prefill
from caramba.model import Model
from caramba.model.model import model_bytes
from caramba.result import Metric


@torch.inference_mode()
def measure(
    model: Model, length: int, batch: int, kind: KVCacheKind, vocab_size: int, device: torch.device
) -> dict[str, float]:
    """Fill a cache of exactly `length` tokens by prefill and count.

    `kv_bytes_per_token` is what one more token of one sequence takes for good, scales and padding included. Of
    `cache_bytes`, all that is allocated, `tail_bytes` hold tokens that a quantised format still has in 16 bits,
    `first_bytes` first tokens that are kept at full precision besides, a constant per sequence, and `slack_bytes`
    nothing; peak is weights plus the largest sum of live tensors; on CUDA it is the allocator's own peak.
    """
    tokens = torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    weights = model_bytes(model)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with AllocationMeter() as meter:
        ctx = model.new_context(batch, length, kind=kind, static=True)
        prefill(model, tokens, ctx)
    peak = torch.cuda.max_memory_allocated(device) - before if on_cuda else meter.peak
    per_token = float(ctx.bytes_per_token)
    return {
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_token_layer": per_token / max(1, len(ctx.caches)),
        "model_bytes": float(weights),
        "peak_bytes": float(weights + peak),
        "cache_bytes": float(ctx.nbytes()),
        "tail_bytes": float(ctx.tail_bytes()),
        "first_bytes": float(ctx.first_bytes()),
        "slack_bytes": float(ctx.nbytes() - ctx.used_bytes()),
    }


def memory(config: MemoryBenchmarkConfig, subjects: Subjects, source: str) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Count bytes per model, sequence length and cache format."""
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for length, kind in itertools.product(config.sequence_lengths, config.quantization_modes):
        for name, model in subjects.models.items():
            values = measure(model.eval(), length, config.batch_size, kind, subjects.vocab_size, subjects.device)
            rows.append({"model": name, "seq": length, "kind": kind.value, "batch": config.batch_size} | values)
            metrics += [
                Metric(
                    f"memory.{name}.{key}@seq={length},kind={kind.value}",
                    values[key],
                    "bytes",
                    1,
                    None,
                    source,
                )
                for key in ("kv_bytes_per_token", "kv_bytes_per_token_layer", "model_bytes", "peak_bytes")
            ]
    return metrics, rows


class AllocationMeter(TorchDispatchMode):
    """Counts live and peak bytes of storages created inside the context.

    Memory that an operator uses and frees within itself is not seen, so the peak is a lower bound of the allocator's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        inputs = {id_of(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta" and id_of(tensor) not in inputs:
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def release(_: object) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, release)
        self.live += size
        self.peak = max(self.peak, self.live)


def id_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which views share."""
    return tensor.untyped_storage()._cdata
