"""Contexts and captured steps that generations of one length bucket share, so that only the first of them captures."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from caramba.cache import TAIL_TOKENS, Context
from caramba.config.cache_policy import step_capacity
from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.infer.device_steps import (
    WARM_UPS,
    DecodeForm,
    DeviceDecoder,
    EagerDecoder,
    Steps,
    choose_steps,
    resolve_form,
    step_refusal,
)
from caramba.infer.policy_measure import cache_bytes
from caramba.infer.row import GenerationRow
from caramba.infer.step import StepState
from caramba.model import Model

KEPT = 2
"""Buckets whose caches stay allocated between calls; the one used longest ago goes first."""
FEWEST_FORWARDS = 2 * (WARM_UPS + 1)
"""Forwards from which `compiled=auto` captures at the first call: a capture runs a step `WARM_UPS` + 1 times as the
host drives it, and takes some time of its own."""
BAKED = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "decode_local_window",
    "compiled",
)
"""Keys of a generation that a captured step holds as constants."""


@dataclass
class PooledSteps:
    """An empty context, the state of its rows, and the steps that run on both."""

    ctx: Context
    state: StepState
    steps: Steps
    form: DecodeForm
    not_compiled: str | None


class StepPool:
    """Prepares generations. Those that run on the device by themselves get a context of their length's bucket, and the
    next of that bucket gets it again, emptied, with what was captured or compiled for it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], PooledSteps] = OrderedDict()
        self._brief: tuple[Any, ...] | None = None  # the key of the last call that was too short to capture

    def prepare(
        self,
        model: Model,
        rows: Sequence[GenerationRow],
        config: GenerateConfig,
        kind: KVCacheKind,
        n_tokens: int,
        limit: int | None,
    ) -> PooledSteps:
        """Return what a generation of `n_tokens` a row, prompt and new text, runs on; `limit` is the most there is."""
        device = model.embedder.token.weight.device
        is_quantised = kind not in EXACT_KINDS
        # A quantised cache of so few tokens stays in 16 bits, in a bucket it would not.
        is_short = is_quantised and n_tokens <= 2 * TAIL_TOKENS
        form, _ = resolve_form(config.compiled, device)
        is_auto = config.compiled == "auto"
        n_forwards, brief = _forwards(rows, config), None
        if is_auto and form == "graph" and n_forwards < FEWEST_FORWARDS:
            brief = f"a first call of {n_forwards} steps is over sooner than with a capture"
        if form == "eager" or is_short:
            return _made(model, rows, config, kind, n_tokens, 0, brief)
        capacity, budget = step_capacity(n_tokens, limit), config.cache_budget_mb
        if is_auto and budget is not None and cache_bytes(model, len(rows), capacity, kind) > budget * 1e6:
            reason = f"a cache of {capacity} tokens, which it takes to keep a graph, is over cache_budget_mb={budget:g}"
            return _made(model, rows, config, kind, n_tokens, 0, reason)
        key = (identity_of(model), len(rows), capacity, kind, *(getattr(config, name) for name in BAKED))
        found = self._kept.pop(key, None)
        if found is None:
            if brief is not None and key != self._brief:
                self._brief = key  # the second such call tells that more may follow
                return _made(model, rows, config, kind, n_tokens, 0, brief)
            if is_quantised and not _takes_steps(model, kind):
                return _made(model, rows, config, kind, n_tokens, 0)
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            for is_last in (not self._kept, True):
                try:
                    found = _made(model, rows, config, kind, capacity, capacity)
                except torch.OutOfMemoryError:
                    if is_last and not is_auto:
                        raise
                if found is not None or is_last:
                    break
                self._kept.clear()  # what is kept for other lengths may take the room
            if found is None:  # nobody asked for a graph, and the text's own length may fit
                reason = f"a cache of {capacity} tokens, which it takes to keep a graph, does not fit"
                return _made(model, rows, config, kind, n_tokens, 0, reason)
            if not isinstance(found.steps, DeviceDecoder):
                # A bucket may reach beyond lengths that steps on the device can serve, where the text does not.
                return _made(model, rows, config, kind, n_tokens, 0)
        else:
            found.ctx.truncate(0)
            found.state.refill(rows)
        self._kept[key] = found
        return found


def _forwards(rows: Sequence[GenerationRow], config: GenerateConfig) -> int:
    """Return the forwards of a generation behind its prefill, if no row ends early."""
    lengths = [len(row.prompt) for row in rows]
    return max(lengths) - min(lengths) + config.max_new_tokens - 1


def _takes_steps(model: Model, kind: KVCacheKind) -> bool:
    """Whether steps on the device run on a cache of this format, which one of a token tells."""
    return step_refusal(model, model.new_context(1, 1, kind, static=True)) is None


def _made(
    model: Model,
    rows: Sequence[GenerationRow],
    config: GenerateConfig,
    kind: KVCacheKind,
    capacity: int,
    width: int,
    reason: str | None = None,
) -> PooledSteps:
    device = model.embedder.token.weight.device
    # Steps on the device and the probe of a cache policy index the whole cache; the host's steps need the window alone.
    is_host = reason is not None or resolve_form(config.compiled, device)[0] == "eager"
    windowed = is_host and not config.cache_plan_probe
    ctx = model.new_context(len(rows), capacity, kind, static=True, windowed=windowed)
    state = StepState.of(rows, config, model.spec.embedder.vocab_size, device, width=width)
    host = EagerDecoder(model, state, ctx, config)
    if reason is not None:
        return PooledSteps(ctx, state, host, "eager", reason)
    return PooledSteps(ctx, state, *choose_steps(host))


def identity_of(model: Model) -> tuple[Any, ...]:
    """Return what changes when the weights that a graph reads move to other memory."""
    weights = tuple(model.parameters())
    return tuple(zip(map(id, weights), addresses(weights), strict=True))


def addresses(weights: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the addresses of weights, 0 for those that are no plain tensors."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return tuple(weight.data_ptr() if type(weight) in plain else 0 for weight in weights)
