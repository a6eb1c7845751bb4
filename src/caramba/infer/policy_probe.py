"""A check of the chosen cache while it is in use: KL on the running text, at intervals, against 16 bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from caramba.cache import TAIL_TOKENS, Context
from caramba.config.kvcache import EXACT_KINDS
from caramba.console import logger
from caramba.infer.agreement import cached_hidden
from caramba.infer.decode import prefill
from caramba.infer.policy import CacheDecision, CachePolicy
from caramba.infer.policy_measure import cache_bytes
from caramba.ops.backend import upcast

MOST_TOKENS = 1024  # of the text's end: bounds what a probe costs


class CacheProbe:
    """Reads the end of the running text through a cache of the chosen kind and through one of 16 bits.

    At most the last 1024 tokens of the first row, and of those the KL where something is stored quantised: past the
    first 64. Above the limit the generation continues with 16 bits, and its text so far is run again.
    """

    def __init__(
        self, policy: CachePolicy, decision: CacheDecision, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.policy, self.decision, self.clock = policy, decision, clock
        self.kind = decision.kind
        self._last = clock()

    def check(self, ctx: Context, fed: Callable[[], Tensor]) -> Context:
        """Return the context to continue with: `ctx`, or one of 16 bits with the same text.

        Args:
            fed: gives the tokens that `ctx` holds, int64 [B, n]; called only when a probe is due.
        """
        config = self.policy.config
        if (
            not config.cache_plan_probe
            or self.kind in EXACT_KINDS
            or ctx.position <= 2 * TAIL_TOKENS
            or self.clock() - self._last < config.cache_plan_probe_interval_sec
        ):
            return ctx
        tokens = fed()
        kl = self._mean_kl(tokens[:1, -MOST_TOKENS:])
        self._last = self.clock()
        is_good = kl <= config.cache_quality_max_mean_kl
        found: dict[str, Any] = {
            "at": ctx.position,
            "kind": self.kind.value,
            "mean_kl": kl,
            "passes": is_good,
        }
        self.decision.probes.append(found)
        return ctx if is_good else self._fall_back(ctx, tokens, found)

    def _mean_kl(self, tokens: Tensor) -> float:
        model = self.policy.model
        p, q = (
            F.log_softmax(
                upcast(model.logits(cached_hidden(model, tokens, kind, TAIL_TOKENS)[:, TAIL_TOKENS:])), -1
            )
            for kind in (self.policy.fallback, self.kind)
        )
        return float((p.exp() * (p - q)).sum(-1).cpu().double().mean())

    def _fall_back(self, ctx: Context, tokens: Tensor, found: dict[str, Any]) -> Context:
        policy, kind, budget = self.policy, self.policy.fallback, self.policy.config.cache_budget_mb
        limit = next(iter(ctx.caches[0].tensors.values())).max_tokens
        size = cache_bytes(policy.model, len(tokens), limit, kind)
        text = f"cache probe at {ctx.position} tokens: KL {found['mean_kl']:.4g} of {self.kind.value} is over the limit"
        if budget is not None and size > budget * 1e6:
            found["then"] = f"kept: {kind.value} takes {size / 1e6:.4g} MB of cache_budget_mb={budget:g}"
            logger.warning(f"{text}; {found['then']}")
            return ctx
        made = policy.model.new_context(len(tokens), limit, kind, static=True)
        prefill(policy.model, tokens, made, policy.config.prefill_chunk)
        found["then"] = f"went on with {kind.value}"
        logger.warning(f"{text}; {found['then']}")
        self.kind = kind
        return made


def fed_tokens(prompts: Tensor, lengths: Tensor, sampled: Tensor, n: int) -> Tensor:
    """Return the first `n` tokens that every row was fed: its prompt, then its sampled tokens.

    Shape: prompts [B, P] int64 of which `lengths` [B] count, sampled [B, N], to [B, n].
    """
    at = torch.arange(n, device=prompts.device).expand(len(prompts), n)
    own = prompts.gather(1, at.clamp(max=prompts.shape[1] - 1))
    new = sampled.gather(1, (at - lengths[:, None]).clamp(0, sampled.shape[1] - 1))
    return torch.where(at < lengths[:, None], own, new)
