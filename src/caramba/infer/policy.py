"""`cache_kind=auto`: the fastest cache within a budget that is good enough on real text, and checks of it in use."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from caramba import __version__
from caramba.cache import TAIL_TOKENS, Context
from caramba.config.cache_policy import CacheKeys
from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.console import logger
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.infer.agreement import cached_hidden
from caramba.infer.decode import prefill
from caramba.infer.device_steps import resolve_form
from caramba.infer.eval_text import EvalText
from caramba.infer.policy_measure import (
    WINDOWS,
    MeasuredFormat,
    PlanFile,
    Quality,
    cache_bytes,
    measure_quality,
    numbers,
    time_decode,
)
from caramba.kernels import get_backend_info
from caramba.model import Model, model_hash
from caramba.model.model import plain_tensors
from caramba.ops.backend import upcast
from caramba.runtime.device import device_facts

FEWEST_TOKENS = 256  # lengths are planned for by powers of two from here up
AS_FAST = 0.9  # of the best speed: a few steps timed on a busy machine do not separate closer formats
COLUMNS = ("kind", "MB", "delta NLL", "PPL ratio", "KL", "needle KL", "recall", "tok/s", "verdict")


@dataclass(frozen=True)
class FormatCandidate:
    """A format, the bytes of its tensors at the asked length, and what was measured of it."""

    kind: KVCacheKind
    nbytes: int
    fits: bool
    quality: Quality | None = None
    tokens_per_second: float | None = None
    failures: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether it fits and has passed every gate."""
        return self.fits and self.quality is not None and not self.failures

    @property
    def verdict(self) -> str:
        """The results of the gates."""
        if not self.fits:
            return "over the budget"
        return "not measured" if self.quality is None else "; ".join(self.failures) or "passes"


@dataclass
class CacheDecision:
    """The chosen format, why, and everything that was measured for it."""

    kind: KVCacheKind
    reason: str
    candidates: tuple[FormatCandidate, ...]
    facts: dict[str, Any]
    is_measured_now: bool
    plan: str | None = None
    probes: list[dict[str, Any]] = field(default_factory=list)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows of a table under `COLUMNS`."""
        return [_row(candidate, candidate.kind is self.kind) for candidate in self.candidates]

    def record(self) -> dict[str, Any]:
        """Return all of it as JSON holds it."""
        listed = [{**asdict(one), "kind": one.kind.value, "verdict": one.verdict} for one in self.candidates]
        return numbers(
            {
                "kind": self.kind.value,
                "reason": self.reason,
                "is_measured_now": self.is_measured_now,
                "plan": self.plan,
                **self.facts,
                "candidates": listed,
                "probes": self.probes,
            }
        )


class CachePolicy:
    """Decides on the format of one model's caches, measuring what no plan on disk tells yet."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None, config: GenerateConfig, held_out: EvalText | None
    ) -> None:
        """Open the text that is named, if one is.

        Raises:
            ConfigError: it cannot be read.
            DataError: it is of another vocabulary.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config
        if config.cache_quality_text is not None:
            held_out = EvalText.of_file(config.cache_quality_text, tokenizer, model.spec.embedder.vocab_size)
        self.held_out = held_out or EvalText("no held-out text was given; name cache_quality_text")
        self._hash: tuple[tuple[Any, ...], str] | None = None

    @property
    def fallback(self) -> KVCacheKind:
        """The 16-bit format of this model: fp16 where its weights are, else bf16."""
        is_fp16 = self.model.embedder.token.weight.dtype is torch.float16
        return KVCacheKind.FP16 if is_fp16 else KVCacheKind.BF16

    @property
    def is_captured(self) -> bool:
        """Whether steps are timed as a CUDA graph: where the generation's are asked to run as one."""
        return "graph" in resolve_form(self.config.compiled, self.model.embedder.token.weight.device)[0]

    def kinds(self) -> tuple[KVCacheKind, ...]:
        """Return the candidates, most exact first; `mixed` where a stream of its own makes it differ from q4_0."""
        names = {name for _, layer in self.model.attention_layers() for name, _, _ in layer.dims.streams}
        mixed = (KVCacheKind.MIXED,) if "k_geo" in names else ()
        return (self.fallback, KVCacheKind.Q8_0, *mixed, KVCacheKind.NF4, KVCacheKind.Q4_0)

    def decide(self, batch_size: int, n_tokens: int) -> CacheDecision:
        """Choose the format of a cache of `batch_size` rows of `n_tokens` tokens.

        Raises:
            ConfigError: nothing fits the budget, nothing that fits it may be used, or a plan is damaged.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            return self._decide(batch_size, n_tokens)
        finally:
            self.model.train(was_training)

    def _decide(self, batch_size: int, n_tokens: int) -> CacheDecision:
        budget = self.config.cache_budget_mb
        sizes = {kind: cache_bytes(self.model, batch_size, n_tokens, kind) for kind in self.kinds()}
        fitting = [kind for kind, size in sizes.items() if budget is None or size <= budget * 1e6]
        if not fitting:
            least = min(sizes, key=lambda kind: sizes[kind])
            raise ConfigError(
                f"cache_budget_mb={budget:g}: {batch_size} rows of {n_tokens} tokens take at least "
                f"{sizes[least] / 1e6:.4g} MB ({least.value}); raise it, or lower max_new_tokens, prompt or batch"
            )
        length, reason = self._length(n_tokens)
        facts: dict[str, Any] = {
            "batch_size": batch_size,
            "n_tokens": n_tokens,
            "text": self.held_out.name,
            "windows_of": length,
            "budget_mb": budget,
            "limits": _limits(self.config),
        }
        known: dict[KVCacheKind, MeasuredFormat] = {}
        plan, is_new = None, False
        if not reason:
            plan = self._plan_file(batch_size, n_tokens, length)
            known = {} if self.config.cache_plan == "refresh" else plan.load()
            if not all(self._is_known(known.get(kind)) for kind in fitting):
                plan.refuse_unwritable()
            planned = self._bucket(n_tokens)
            # Half of what is planned for is below what is asked for, so timing takes no more memory than the call.
            facts["timed_at"] = timed_at = min(planned, max(FEWEST_TOKENS, planned // 2))
            is_new = self._measure(known, fitting, batch_size, timed_at, length)
        candidates = tuple(self._candidate(kind, sizes[kind], fitting, known, batch_size) for kind in sizes)
        kind, why = choose(candidates, self.fallback, reason, self.config)
        if length == self.config.cache_quality_max_tokens < self._bucket(n_tokens):
            why += f"; quality is that of windows of {length} tokens (cache_quality_max_tokens)"
        decision = CacheDecision(kind, why, candidates, facts, is_new)
        if plan is not None:
            decision.plan = str(plan.path)
            if is_new:
                plan.save(known, decision.record())
        return decision

    def _is_known(self, one: MeasuredFormat | None) -> bool:
        if one is None or one.quality is None:
            return False
        return not self.config.cache_auto_benchmark or one.step_s is not None or bool(one.quality.failures(self.config))

    def _measure(
        self,
        known: dict[KVCacheKind, MeasuredFormat],
        kinds: list[KVCacheKind],
        batch_size: int,
        timed_at: int,
        length: int,
    ) -> bool:
        """Fill in what is not known of `kinds`; return whether that was anything."""
        tokens, config = self.held_out.tokens, self.config
        assert tokens is not None
        is_new = False
        for kind in kinds:
            one = known.setdefault(kind, MeasuredFormat())
            if one.quality is None:
                one.quality = measure_quality(self.model, tokens, self.tokenizer, kind, length)
                is_new = True
            if config.cache_auto_benchmark and one.step_s is None and not one.quality.failures(config):
                one.step_s = time_decode(
                    self.model,
                    tokens,
                    kind,
                    batch_size=batch_size,
                    length=timed_at,
                    steps=config.cache_auto_bench_steps,
                    is_captured=self.is_captured,
                )
                is_new = True
        return is_new

    def _candidate(
        self,
        kind: KVCacheKind,
        size: int,
        fitting: list[KVCacheKind],
        known: dict[KVCacheKind, MeasuredFormat],
        batch_size: int,
    ) -> FormatCandidate:
        one, fits = known.get(kind, MeasuredFormat()), kind in fitting
        failures = () if one.quality is None else one.quality.failures(self.config)
        timed = one.step_s if self.config.cache_auto_benchmark else None
        return FormatCandidate(kind, size, fits, one.quality, timed and batch_size / timed, failures)

    def _bucket(self, n_tokens: int) -> int:
        """Return the length that is planned for: the next power of two, within what the model can read."""
        planned = max(FEWEST_TOKENS, 1 << (n_tokens - 1).bit_length())
        limits = (self.model.spec.embedder.max_positions, self.config.max_seq_len)
        return max(n_tokens, min([planned, *(limit for limit in limits if limit is not None)]))

    def _length(self, n_tokens: int) -> tuple[int, str]:
        """Return the tokens of a window to measure on, and why nothing can be measured, if so."""
        tail = 2 * TAIL_TOKENS
        if n_tokens <= tail:
            return 0, f"a cache of at most {tail} tokens holds all of them in 16 bits, whatever its kind"
        tokens = self.held_out.tokens
        if tokens is None:
            return 0, self.held_out.name
        length = min(self._bucket(n_tokens), self.config.cache_quality_max_tokens, tokens.size - 1)
        if length <= tail:
            return 0, (
                f"{self.held_out.name} has {tokens.size} tokens, and a quantised cache keeps {tail} in 16 bits; "
                "name a longer cache_quality_text"
            )
        return length, ""

    def _plan_file(self, batch_size: int, n_tokens: int, length: int) -> PlanFile:
        model, config = self.model, self.config
        device = model.embedder.token.weight.device
        facts = {
            "caramba": __version__,
            "model": self._model_hash(),
            "dtype": str(model.embedder.token.weight.dtype),
            "device": device_facts(device),
            "kernels": get_backend_info(device)["ops"],
            "batch_size": batch_size,
            "length": self._bucket(n_tokens),
            "text": self.held_out.fingerprint,
            "tokenizer": None if self.tokenizer is None else self.tokenizer.hash,
            "windows": [WINDOWS, length, TAIL_TOKENS],
            "bench_steps": config.cache_auto_bench_steps,
            "decode": [config.decode_local_window, self.is_captured],
        }
        return PlanFile(facts, config.cache_plan_path)

    def _model_hash(self) -> str:
        seen = tuple(
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for tensor in plain_tensors(self.model.parameters())
        )
        if self._hash is None or self._hash[0] != seen:
            self._hash = seen, model_hash(self.model)
        return self._hash[1]


def choose(
    candidates: tuple[FormatCandidate, ...], fallback: KVCacheKind, unmeasured: str, config: CacheKeys
) -> tuple[KVCacheKind, str]:
    """Return the format to use, and why.

    Of those that fit and pass: the smallest of those within 10% of the fastest, without timings the smallest of all.
    If none does, or nothing could be measured (`unmeasured` is the reason), the 16-bit format.

    Raises:
        ConfigError: it has to be the 16-bit format, and that does not fit the budget.
    """
    good = [one for one in candidates if one.is_good]
    if not good:
        reason = unmeasured or "no kind that fits passes the gates: " + "; ".join(
            f"{one.kind.value}: {one.verdict}" for one in candidates if one.fits
        )
        safe = next(one for one in candidates if one.kind is fallback)
        if not safe.fits:
            raise ConfigError(
                f"cache_budget_mb={config.cache_budget_mb:g}: only {fallback.value} may be used ({reason}), and it "
                f"takes {safe.nbytes / 1e6:.4g} MB; raise the budget, or name a cache_kind to take it unmeasured"
            )
        return fallback, reason
    best = max((one.tokens_per_second or 0.0) for one in good)
    fast = [one for one in good if (one.tokens_per_second or 0.0) >= AS_FAST * best]
    chosen = min(fast, key=lambda one: one.nbytes)
    speed = f"the smallest of {len(fast)} as fast as the fastest" if best else "the smallest"
    return chosen.kind, f"{speed}, of {len(good)} that fit and pass the gates" + _of_needle(chosen)


def _of_needle(chosen: FormatCandidate) -> str:
    assert chosen.quality is not None
    if chosen.quality.is_needle_informative:
        return ""
    return "; the needle does not measure recall, since the model finds none without a cache either"


def _limits(config: CacheKeys) -> dict[str, float]:
    return {
        "delta_nll": config.cache_quality_max_delta_nll,
        "ppl_ratio": config.cache_quality_max_ppl_ratio,
        "mean_kl": config.cache_quality_max_mean_kl,
    }


def _row(one: FormatCandidate, is_chosen: bool) -> tuple[Any, ...]:
    quality = one.quality
    name = f"{one.kind.value} *" if is_chosen else one.kind.value
    speed = "" if one.tokens_per_second is None else f"{one.tokens_per_second:.1f}"
    if quality is None or quality.problem:
        return (name, f"{one.nbytes / 1e6:.3f}", "", "", "", "", "", speed, one.verdict)
    recall = f"{quality.needle_recall:.0%} of {quality.needle_recall_without_cache:.0%}"
    measured = (quality.delta_nll, quality.ppl_ratio, quality.mean_kl, quality.needle_kl)
    return (
        name,
        f"{one.nbytes / 1e6:.3f}",
        *(f"{value:.3g}" if at != 1 else f"{value:.4f}" for at, value in enumerate(measured)),
        recall,
        speed,
        one.verdict,
    )


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
            F.log_softmax(upcast(model.logits(cached_hidden(model, tokens, kind, TAIL_TOKENS)[:, TAIL_TOKENS:])), -1)
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
