"""What the cache policy measures of one format: bytes, quality on held-out text and on needles, speed; and its file."""

import hashlib
import json
import math
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from caramba.cache import TAIL_TOKENS
from caramba.config.cache_policy import CacheKeys
from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import KVCacheKind
from caramba.data import TokenDataset, Tokenizer
from caramba.data.folder import Tokens
from caramba.errors import CarambaError, ConfigError, DataError
from caramba.infer.agreement import agreement, cached_hidden
from caramba.infer.decode import prefill
from caramba.infer.device_steps import EagerDecoder, choose_steps
from caramba.infer.row import GenerationRow
from caramba.infer.step import StepState
from caramba.lower.lowering import lower
from caramba.model import Model
from caramba.model.custom_layers import cached_layers
from caramba.model.model import context_of
from caramba.ops.backend import upcast
from caramba.runs.files import home, write_json
from caramba.runtime import synchronize

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SEED = 0x4EED1E
MARK_TOKENS, KEY_TOKENS = 4, 5  # without a tokenizer: tokens of the text in place of words


@dataclass(frozen=True)
class Needle:
    """A row of tokens whose last ones, the key, also occur at `depth` of it."""

    depth: float
    tokens: tuple[int, ...]
    key: int  # how many tokens


@dataclass(frozen=True)
class NeedleScore:
    """Of one depth: whether every token of the key was the likeliest, and the mean KL from the model without a
    cache over them, in nats."""

    depth: float
    is_found: bool
    kl: float


def make_needles(text: Tokens, length: int, tokenizer: Tokenizer | None) -> list[Needle]:
    """Return a needle per depth, in rows of at most `length` tokens of `text`, each with its own key.

    With a tokenizer the needle is a sentence with five digits, asked for by its beginning; without one it is a mark of
    four tokens and a key of five, sampled from the text's own.
    """
    chooser = random.Random(SEED)
    needles = []
    for index, depth in enumerate(DEPTHS):
        mark, key, end = _sentence(chooser, text, tokenizer)
        room = length - 2 * (len(mark) + len(key)) - len(end)
        start = index * max(0, text.size - room) // len(DEPTHS)
        filler = [int(token) for token in np.asarray(text[start : start + room])]
        at = round(depth * len(filler))
        row = (*filler[:at], *mark, *key, *end, *filler[at:], *mark, *key)
        needles.append(Needle(depth, row, len(key)))
    return needles


@torch.inference_mode()
def find_needles(
    model: Model, needles: list[Needle], kind: KVCacheKind, tail_tokens: int
) -> tuple[list[NeedleScore], list[bool]]:
    """Return what a model finds through a cache of `kind`, and whether it finds each without a cache."""
    device = model.embedder.token.weight.device
    scores: dict[float, NeedleScore] = {}
    without: dict[float, bool] = {}
    for n_key in {needle.key for needle in needles}:
        for length in {len(needle.tokens) for needle in needles if needle.key == n_key}:
            alike = [each for each in needles if (each.key, len(each.tokens)) == (n_key, length)]
            rows = torch.tensor([needle.tokens for needle in alike], device=device)
            targets, fed = rows[:, -n_key:], rows[:, :-1]
            reference = _log_probs(model, model.hidden(fed), n_key)
            cached = _log_probs(model, cached_hidden(model, fed, kind, tail_tokens), n_key)
            kl = (reference.exp() * (reference - cached)).sum(-1).mean(-1).tolist()
            found = (cached.argmax(-1) == targets).all(-1).tolist()
            known = (reference.argmax(-1) == targets).all(-1).tolist()
            for row, needle in enumerate(alike):
                scores[needle.depth] = NeedleScore(needle.depth, found[row], kl[row])
                without[needle.depth] = known[row]
    order = sorted(scores)
    return [scores[depth] for depth in order], [without[depth] for depth in order]


def _log_probs(model: Model, hidden: Tensor, n: int) -> Tensor:
    return F.log_softmax(upcast(model.logits(hidden[:, -n:])), dim=-1)


def _sentence(
    chooser: random.Random, text: Tokens, tokenizer: Tokenizer | None
) -> tuple[list[int], list[int], list[int]]:
    if tokenizer is None:
        drawn = [int(text[chooser.randrange(text.size)]) for _ in range(MARK_TOKENS + KEY_TOKENS)]
        return drawn[:MARK_TOKENS], drawn[MARK_TOKENS:], []
    digits = "".join(chooser.choices("0123456789", k=5))
    return (
        tokenizer.encode("\nThe pass key is"),
        tokenizer.encode(f" {digits}"),
        tokenizer.encode(". Remember it.\n"),
    )


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
    scores, without = find_needles(model, make_needles(tokens, length, tokenizer), kind, tail_tokens=TAIL_TOKENS)
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


FORMAT = 1


@dataclass
class MeasuredFormat:
    """What is known of one format so far: its quality, and the seconds of a decode step."""

    quality: Quality | None = None
    step_s: float | None = None


class PlanFile:
    """Measurements by format, valid for exactly the facts that they were made under.

    Without a path the file's name carries the hash of the facts; a named file of other facts is measured again and
    replaced.
    """

    def __init__(self, facts: dict[str, Any], path: str | None) -> None:
        self.facts = facts
        self.key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        default = home() / "runtime_plans" / f"cache-{self.key[:16]}.json"
        self.path = default if path is None else Path(path).expanduser()

    def load(self) -> dict[KVCacheKind, MeasuredFormat]:
        """Return what was measured under these facts; nothing where the file is of others or not there.

        Raises:
            ConfigError: the file is no plan of a cache.
        """
        try:
            content = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise self._damaged(error) from None
        try:
            raw = json.loads(content)
            if raw["format"] != FORMAT:
                raise ValueError(f"format {raw['format']}, expected {FORMAT}")
            if raw["key"] != self.key:
                return {}
            return {KVCacheKind(kind): _measured(item) for kind, item in raw["kinds"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(error) from None

    def refuse_unwritable(self) -> None:
        """See that `save` has a place, before anything is measured for it.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            problem = "a folder" if self.path.is_dir() else ""
            problem = problem or ("" if os.access(self.path.parent, os.W_OK) else "its folder is read-only")
        except OSError as error:
            problem = str(error)
        if problem:
            raise ConfigError(
                f"{self.path}: what is measured of a cache cannot be written there ({problem}); name another "
                "cache_plan_path"
            )

    def save(self, kinds: dict[KVCacheKind, MeasuredFormat], decision: dict[str, Any]) -> None:
        """Write what is known, and the last decision that was made from it, for people."""
        listed = {kind.value: numbers(asdict(item)) for kind, item in kinds.items()}
        write_json(
            self.path,
            {
                "format": FORMAT,
                "key": self.key,
                "facts": self.facts,
                "kinds": listed,
                "last_decision": decision,
            },
        )

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.path}: not a plan of a cache ({type(error).__name__}: {error}); delete it, or measure again with "
            "cache_plan=refresh"
        )


def numbers(value: Any) -> Any:
    """Return a value as JSON holds it: NaN and infinity become None."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measured(item: dict[str, Any]) -> MeasuredFormat:
    quality, step_s = item["quality"], item["step_s"]
    if step_s is not None and not step_s > 0:
        raise ValueError(f"step_s is {step_s}, expected seconds")
    if quality is None:
        return MeasuredFormat(None, step_s)
    known = {field.name for field in fields(Quality)}
    if set(quality) != known:
        raise ValueError(f"quality has {sorted(quality)}, expected {sorted(known)}")
    values: dict[str, Any] = {}
    for name, value in quality.items():
        if name == "problem":
            values[name] = str(value)
        elif name == "needle_depths":
            values[name] = tuple(
                (float(depth), bool(found), math.nan if kl is None else float(kl)) for depth, found, kl in value
            )
        else:
            values[name] = math.nan if value is None else float(value)
    return MeasuredFormat(Quality(**values), step_s)
