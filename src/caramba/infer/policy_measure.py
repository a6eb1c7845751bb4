"""What the cache policy measures of one format: its bytes, its quality on held-out text, and its decode speed."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from caramba.cache import TAIL_TOKENS
from caramba.config.cache_policy import CacheKeys
from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import KVCacheKind
from caramba.data import TokenDataset, Tokenizer
from caramba.data.stream import Tokens
from caramba.errors import CarambaError, ConfigError, DataError
from caramba.infer.agreement import agreement
from caramba.infer.decode import prefill
from caramba.infer.device_steps import EagerDecoder, choose_steps
from caramba.infer.needle import find_needles, make_needles
from caramba.infer.row import GenerationRow
from caramba.infer.step import StepState
from caramba.lower.lowering import lower
from caramba.model import Model
from caramba.model.custom_layers import cached_layers
from caramba.model.model import context_of
from caramba.runtime import synchronize

WINDOWS = 8
WARM_UP_STEPS = 3
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Quality:
    """Compares a model with and without a cache, on the same held-out windows and needles.

    `problem` is why there are no numbers; they are then NaN, which passes no gate.
    """

    delta_nll: float = math.nan
    ppl_ratio: float = math.nan
    mean_kl: float = math.nan
    top1: float = math.nan
    needle_kl: float = math.nan
    needle_recall: float = math.nan
    needle_recall_without_cache: float = math.nan
    needle_depths: tuple[tuple[float, bool, float], ...] = ()
    problem: str = ""

    @property
    def is_needle_informative(self) -> bool:
        """Whether the model finds any needle at all; otherwise its recall cannot fall."""
        return self.needle_recall_without_cache > 0

    def failures(self, limits: CacheKeys) -> tuple[str, ...]:
        """Return the gates that it does not pass, in words. NaN passes none."""
        if self.problem:
            return (self.problem,)
        gates = (
            ("delta NLL", self.delta_nll, limits.cache_quality_max_delta_nll),
            ("PPL ratio", self.ppl_ratio, limits.cache_quality_max_ppl_ratio),
            ("mean KL", self.mean_kl, limits.cache_quality_max_mean_kl),
            ("needle KL", self.needle_kl, limits.cache_quality_max_mean_kl),
        )
        found = [f"{name} {value:.4g} > {limit:g}" for name, value, limit in gates if not value <= limit]
        if not self.needle_recall >= self.needle_recall_without_cache:
            found.append(f"needle recall {self.needle_recall:.0%} < {self.needle_recall_without_cache:.0%}")
        return tuple(found)


def cache_bytes(model: Model, batch_size: int, n_tokens: int, kind: KVCacheKind) -> int:
    """Return the bytes of the tensors that a static cache allocates, without allocating them."""
    meta = torch.device("meta")
    return context_of(cached_layers(model), batch_size, n_tokens, kind, meta, static=True).nbytes()


def measure_quality(
    model: Model, tokens: Tokens, tokenizer: Tokenizer | None, kind: KVCacheKind, length: int
) -> Quality:
    """Measure a kind on up to 8 windows of `length` held-out tokens and a needle at each of five depths.

    Keys and values are stored as decoding stores them, with the same 16-bit tail.
    """
    device = model.embedder.token.weight.device
    try:
        near = agreement(
            model,
            model,
            TokenDataset(tokens, length),
            windows=WINDOWS,
            batch_size=1,
            device=device,
            kind=kind,
            tail_tokens=TAIL_TOKENS,
        )
    except (ConfigError, DataError):
        raise
    except CarambaError:  # agreement's word for sums that are not finite
        return Quality(problem="the NLL or the KL on held-out text is not finite")
    scores, without = find_needles(
        model, make_needles(tokens, length, tokenizer), kind, tail_tokens=TAIL_TOKENS
    )
    return Quality(
        delta_nll=near.delta_nll,
        ppl_ratio=math.exp(min(near.delta_nll, 700.0)),  # larger ones are no number of this type
        mean_kl=near.kl,
        top1=near.top1,
        needle_kl=statistics.fmean(score.kl for score in scores),
        needle_recall=statistics.fmean(score.is_found for score in scores),
        needle_recall_without_cache=statistics.fmean(without),
        needle_depths=tuple((score.depth, score.is_found, score.kl) for score in scores),
    )


@torch.inference_mode()
def time_decode(
    model: Model,
    tokens: Tokens,
    kind: KVCacheKind,
    *,
    batch_size: int,
    length: int,
    steps: int,
    is_captured: bool = False,
) -> float:
    """Return the median seconds of a decode step behind `length` - `steps` tokens, each step waited for.

    The prefill and three steps of warm-up are not counted. `is_captured` times steps as one CUDA graph where they can
    be: the host's time for each kernel hides what formats differ by.
    """
    device = model.embedder.token.weight.device
    steps = min(steps, length - WARM_UP_STEPS - 1)
    n_before = length - steps - WARM_UP_STEPS
    text = np.resize(np.asarray(tokens[:n_before]).astype(np.int64), n_before)
    rows = torch.from_numpy(text).to(device).expand(batch_size, -1)
    with lower(model, device, "decode"):
        ctx = model.new_context(batch_size, length, kind, static=True)
        config = GenerateConfig(
            max_new_tokens=WARM_UP_STEPS + steps, temperature=0.0, compiled="graph" if is_captured else False
        )
        drawn = GenerationRow.of([[0]] * batch_size, config, (), None, None)
        state = StepState.of(drawn, config, model.spec.embedder.vocab_size, device)
        stepper, _, _ = choose_steps(EagerDecoder(model, state, ctx, config))
        logits = prefill(model, rows, ctx, PREFILL_CHUNK)
        stepper.resume()
        seconds = []
        for _ in range(WARM_UP_STEPS + steps):
            token = stepper.choose(logits)
            synchronize(device)
            began = time.perf_counter()
            logits = stepper.forward(token)
            synchronize(device)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[WARM_UP_STEPS:])
