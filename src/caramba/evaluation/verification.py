"""The verifications of a run: distances, fidelity and cache bytes of a student against its teacher, with bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from caramba.config.estimate import model_cost
from caramba.config.extension import OwnCheckConfig
from caramba.config.model import ModelSpec
from caramba.config.verify import (
    KINDS,
    AccuracyBounds,
    ChoiceLogprobCase,
    CompareVerifyConfig,
    EvalCase,
    EvalVerifyConfig,
    FidelityVerifyConfig,
    IntGreedyCase,
    KVCacheVerifyConfig,
    VerifyConfig,
)
from caramba.console import logger
from caramba.data import (
    IGNORED,
    TokenDataset,
    Tokenizer,
    Windows,
    batches,
    documents_of,
    load_tokenizer,
    open_benchmark_text,
    spread_windows,
)
from caramba.data.corpus import collect_documents, stdlib_root
from caramba.errors import ConfigError, VerificationFailed
from caramba.evaluation.own import own_check
from caramba.infer import greedy_until, prefill, score_continuations
from caramba.infer.agreement import Agreement, agreement
from caramba.layer import AttentionLayer
from caramba.model import Model, Trace
from caramba.result import Answer, Case, Check, Verdict
from caramba.runtime.device import wide_dtype

PYTHON, SPACED = "python", "spaced"
_VAL_FRAC = 0.05
_MARKS = re.compile(r"(\w)([^\w\s])|([^\w\s])(\w)")


def label_of(name: str) -> str:
    """Return the name of a text in the names of checks."""
    return re.sub(r"[^A-Za-z0-9]+", "_", Path(name).stem).strip("_").lower() or "text"


def check_other_texts(names: Iterable[str], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """Return the texts that can be measured on; before a run trains.

    Without a tokenizer the two built-in texts are left out, with a warning.

    Raises:
        ConfigError: a path that does not exist.
    """
    found = []
    for name in names:
        if name in (PYTHON, SPACED):
            if tokenizer is None:
                logger.warning(
                    f"verify fidelity: text {name} is left out: the run's data does not say which tokenizer made it"
                )
                continue
        elif not Path(name).expanduser().exists():
            raise ConfigError(
                f"verify fidelity: texts: {name} does not exist; use python, spaced, a token folder or file, or a "
                "UTF-8 text file"
            )
        found.append(name)
    return tuple(found)


def open_other_text(
    name: str, own: Windows, tokenizer: Tokenizer | None, *, vocab_size: int, block_size: int, windows: int
) -> TokenDataset:
    """Return up to `windows` windows of another text, encoded with the run's tokenizer.

    `python` is held-out source of the standard library; `spaced` the run's own held-out text with spaces around
    punctuation, as in WikiText-2; anything else the path of a token folder, .npy or .tokens file, or UTF-8 text.

    Raises:
        ConfigError: no tokenizer, or a text that is missing or too short.
        DataError: tokens of another tokenizer.
    """
    path = Path(name).expanduser()
    if name not in (PYTHON, SPACED) and (path.is_dir() or path.suffix in (".npy", ".tokens")):
        opened = open_benchmark_text(path)
        opened.check(vocab_size, block_size, tokenizer)
        return TokenDataset(opened.tokens, block_size)
    if tokenizer is None:
        raise ConfigError(
            f"verify fidelity: texts: {name}: the run's data does not say which tokenizer made it; use a token folder "
            "(caramba prepare), or name tokens in `texts`"
        )
    wanted, found = windows * block_size + 1, 0
    parts: list[np.ndarray] = []
    for text in _documents(name, path, own, tokenizer):
        parts += tokenizer.encode_documents([text])
        found += len(parts[-1])
        if found >= wanted:
            break
    ids = np.concatenate(parts)[:wanted] if parts else np.zeros(0, np.int64)
    if len(ids) <= block_size:
        raise ConfigError(
            f"verify fidelity: texts: {name}: {len(ids)} tokens, one window needs {block_size + 1}; use a longer text "
            "or a smaller block_size"
        )
    return TokenDataset(ids, block_size)


def _documents(name: str, path: Path, own: Windows, tokenizer: Tokenizer) -> Iterable[str]:
    if name == PYTHON:
        return collect_documents(stdlib_root(), _VAL_FRAC).texts("val")
    if name == SPACED:
        return _spaced(own, tokenizer)
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"verify fidelity: texts: {name}: {error}; use python, spaced, a token folder or a UTF-8 text file"
        ) from None


def _spaced(own: Windows, tokenizer: Tokenizer) -> Iterator[str]:
    for index in spread_windows(len(own), len(own)):
        targets = own[index][1]
        yield space_marks(tokenizer.decode(targets[targets != IGNORED].tolist()))


def space_marks(text: str) -> str:
    """Return the text with a space between a word and a mark of punctuation next to it."""
    twice = _MARKS.sub(r"\1\3 \2\4", text)  # a mark between two words touches both
    return _MARKS.sub(r"\1\3 \2\4", twice)


INTEGER = re.compile(r"[-+]?[0-9]+")
TEACHER, STUDENT = "teacher", "student"


@dataclass(frozen=True)
class EncodedCase:
    """A case as token ids: its prompt, without the `dropped` first tokens that do not fit, and its choices."""

    case: EvalCase
    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()
    dropped: int = 0


def encode_cases(
    config: EvalVerifyConfig, tokenizer: Tokenizer, *, vocab_size: int, max_positions: int | None
) -> tuple[EncodedCase, ...]:
    """Turn every case into token ids. It needs no model, so that a run can fail before it trains.

    Args:
        vocab_size: V of the models; max_positions: the longest sequence that both can read, None for no limit.

    Raises:
        ConfigError: a tokenizer or a context window that the models cannot take, or a case that does not fit it.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"verify eval: tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, the models {vocab_size}; "
            "leave tokenizer out to take that of the run's data, or name the one that the models were trained with"
        )
    window = config.context_window
    if window is not None and max_positions is not None and window > max_positions:
        raise ConfigError(
            f"verify eval: context_window={window} exceeds the {max_positions} positions that the models have learned; "
            "lower it"
        )
    return tuple(_encode(case, tokenizer, window or max_positions, config.max_new_tokens) for case in config.cases)


def ask(
    config: EvalVerifyConfig, cases: Sequence[EncodedCase], models: Mapping[str, Model], tokenizer: Tokenizer
) -> tuple[tuple[Check, ...], tuple[Case, ...]]:
    """Put every case to every model; return the checks and each case with its answers.

    An answer of `int_greedy` is the first integer of the greedy text, which ends at the end mark or after
    `max_new_tokens`; that of `choice_logprob` the choice c of the highest log p(c | prompt), over its tokens' number
    where the case asks for it.

    Raises:
        VerificationFailed: a log-probability that is not a number.
    """
    asked: list[Case] = []
    for item in cases:
        case = item.case
        answers = tuple(_answer(item, name, model, config, tokenizer) for name, model in models.items())
        is_choice = isinstance(case, ChoiceLogprobCase)
        asked.append(
            Case(
                id=case.id,
                kind=case.kind,
                prompt=case.prompt,
                expected=case.expected,
                answers=answers,
                choices=case.choices if is_choice else (),
                length_normalized=case.length_normalized if is_choice else None,
                dropped_tokens=item.dropped,
            )
        )
    return _checks(config, asked), tuple(asked)


def first_integer(text: str) -> str | None:
    """Return the first integer of a text in plain form ("+07" is "7"), or None when there is none."""
    found = INTEGER.search(text)
    if found is None:
        return None
    digits = found[0].lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if found[0][0] == "-" and digits != "0" else digits


def _encode(case: EvalCase, tokenizer: Tokenizer, window: int | None, max_new_tokens: int) -> EncodedCase:
    prompt = with_start(tokenizer, tokenizer.encode(case.prompt))
    if isinstance(case, IntGreedyCase):
        longest, choices = max_new_tokens, ()
    else:
        choices = tuple(encode_continuation(tokenizer, case.prompt, choice) for choice in case.choices)
        longest = max(map(len, choices))
    room = len(prompt) if window is None else window - longest
    if room < 1:
        raise ConfigError(
            f"verify eval: case {case.id!r} needs {longest} tokens for its answer and the context window has {window}; "
            "raise context_window or lower max_new_tokens"
        )
    dropped = max(0, len(prompt) - room)
    return EncodedCase(case, tuple(prompt[dropped:]), choices, dropped)


def with_start(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Put the start mark first where the model wants one; a prompt without any token begins with the end mark."""
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]


def encode_continuation(tokenizer: Tokenizer, prompt: str, choice: str) -> tuple[int, ...]:
    """Return the tokens of a choice as they follow the prompt's, or on its own where the two would merge."""
    before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + choice)
    follows = whole[: len(before)] == before and len(whole) > len(before)
    return tuple(whole[len(before) :] if follows else tokenizer.encode(choice))


def _answer(item: EncodedCase, name: str, model: Model, config: EvalVerifyConfig, tokenizer: Tokenizer) -> Answer:
    case = item.case
    if isinstance(case, IntGreedyCase):
        new = greedy_until(model, item.prompt, config.max_new_tokens, eos_id=tokenizer.eos_id)
        text = tokenizer.decode(token for token in new if token < tokenizer.vocab_size)
        answer = first_integer(text)
        return Answer(name, answer, answer == case.expected, text)
    longest = len(item.prompt) + max(map(len, item.choices))
    scored = score_continuations(
        model, [(item.prompt, choice) for choice in item.choices], max_length=longest, batch_size=8
    )
    sums, means = tuple(score.logprob for score in scored), tuple(score.per_token for score in scored)
    if not all(map(math.isfinite, sums)):
        raise VerificationFailed(
            f"verify eval: the {name}'s log-probabilities of case {case.id!r} are {sums}; it diverged, lower lr"
        )
    decisive = means if case.length_normalized else sums
    chosen = case.choices[decisive.index(max(decisive))]
    return Answer(name, chosen, chosen == case.expected, None, sums, means)


def _checks(config: EvalVerifyConfig, cases: Sequence[Case]) -> tuple[Check, ...]:
    checks = _accuracy(cases, config.thresholds, "")
    kinds = [kind for kind in KINDS if any(case.kind == kind for case in cases)]
    for kind in kinds if len(kinds) > 1 or any(getattr(config.thresholds, kind).is_set for kind in kinds) else ():
        chosen = [case for case in cases if case.kind == kind]
        checks += _accuracy(chosen, getattr(config.thresholds, kind), f"_{kind}")
    same = [len({answer.answer for answer in case.answers}) == 1 for case in cases]
    return (*checks, Check("agreement", sum(same) / len(same), None, "share"))


def _accuracy(cases: Sequence[Case], bounds: AccuracyBounds, suffix: str) -> tuple[Check, ...]:
    right = {name: sum(_is_right(case, name) for case in cases) for name in (TEACHER, STUDENT)}
    teacher, student = right[TEACHER] / len(cases), right[STUDENT] / len(cases)
    # One division: 3/4 - 1/2 of binary fractions may exceed the bound that it equals.
    drop = (right[TEACHER] - right[STUDENT]) / len(cases)
    return (
        Check(f"student_accuracy{suffix}", student, bounds.min_student_accuracy, "share", is_minimum=True),
        Check(f"teacher_accuracy{suffix}", teacher, None, "share"),
        Check(f"accuracy_drop{suffix}", drop, bounds.max_accuracy_drop, "share"),
    )


def _is_right(case: Case, model: str) -> bool:
    return any(answer.is_correct for answer in case.answers if answer.model == model)


class _L1:
    """Running mean and maximum of |a - b|."""

    def __init__(self) -> None:
        self.total, self.count, self.largest = 0.0, 0, 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        difference = (a.float() - b.float()).abs()
        self.total += difference.to(wide_dtype(difference.device)).sum().item()
        self.count += difference.numel()
        self.largest = max(self.largest, difference.max().item())

    @property
    def mean(self) -> float:
        return self.total / self.count


def _is_attention(_name: str, module: torch.nn.Module) -> bool:
    return isinstance(module, AttentionLayer)


@torch.inference_mode()
def compare(
    teacher: Model, student: Model, dataset: Windows, config: CompareVerifyConfig, device: torch.device
) -> tuple[Check, ...]:
    """Run both models on the same held-out batches; each on its own hidden states, so errors accumulate with depth.

    `attention_mean_l1` is the largest of the layers' means: one bad layer is not hidden by good ones.
    Padding is left out. Shape: attention outputs [B, T, M], logits [B, T, V].
    """
    indices = spread_windows(len(dataset), config.batches * config.batch_size)
    layers: list[_L1] = []
    logits = _L1()
    for batch in batches(dataset, indices, config.batch_size):
        x, documents = batch[0].to(device), documents_of(batch)
        documents = None if documents is None else documents.to(device)
        counted = ... if documents is None else documents >= 0
        with Trace(teacher, predicate=_is_attention) as ours:
            reference = teacher(x, documents=documents)
        with Trace(student, predicate=_is_attention) as theirs:
            found = student(x, documents=documents)
        logits.add(found[counted], reference[counted])
        layers = layers or [_L1() for _ in ours.outputs]
        for layer, a, b in zip(layers, theirs.outputs, ours.outputs, strict=True):
            layer.add(a[counted], b[counted])
    checks = [
        Check("attention_mean_l1", max(layer.mean for layer in layers), config.attention.max_mean_l1),
        Check("attention_max_l1", max(layer.largest for layer in layers), config.attention.max_max_l1),
        Check("logits_mean_l1", logits.mean, config.logits.max_mean_l1),
        Check("logits_max_l1", logits.largest, config.logits.max_max_l1),
    ]
    each = [Check(f"attention_mean_l1_layer{index}", layer.mean, None) for index, layer in enumerate(layers)]
    return (*checks, *each)


def fidelity(
    teacher: Model,
    student: Model,
    dataset: Windows,
    config: FidelityVerifyConfig,
    device: torch.device,
    tokenizer: Tokenizer | None = None,
) -> tuple[Check, ...]:
    """Measure both models on the same disjoint windows, over all tokens and by position in the window.

    A student that loses what is far back has a ratio that grows with the position, which short windows hide; one that
    fits the training text has a larger ratio on the other texts of the config.
    Shape: items of `dataset` are (x [T], y [T]) int64.
    """
    windows = config.batches * config.batch_size

    def measure(text: Windows) -> Agreement:
        return agreement(teacher, student, text, windows=windows, batch_size=config.batch_size, device=device)

    found = measure(dataset)
    bins = found.by_position
    others: list[Check] = []
    for name in check_other_texts(config.texts, tokenizer):
        text = open_other_text(
            name,
            dataset,
            tokenizer,
            vocab_size=teacher.spec.embedder.vocab_size,
            block_size=config.block_size,
            windows=windows,
        )
        others += _on_text(label_of(name), measure(text))
    return (
        Check("window_tokens", float(config.block_size), None, "tokens"),
        Check("delta_nll", found.delta_nll, config.max_delta_nll, "nats"),
        Check("ppl_ratio", found.ppl_ratio, config.max_ppl_ratio, "ratio"),
        Check("kl", found.kl, config.max_kl, "nats"),
        Check("top1_agreement", found.top1, config.min_top1_agreement, "share", is_minimum=True),
        *(Check(f"ppl_ratio_at_{one.start}_{one.end}", one.ppl_ratio, None, "ratio") for one in bins),
        *(Check(f"kl_at_{one.start}_{one.end}", one.kl, None, "nats") for one in bins),
        *(Check(f"top1_agreement_at_{one.start}_{one.end}", one.top1, None, "share") for one in bins),
        *others,
    )


def _on_text(label: str, found: Agreement) -> list[Check]:
    values = (("ppl_ratio", found.ppl_ratio), ("kl", found.kl), ("top1_agreement", found.top1))
    units = {"ppl_ratio": "ratio", "kl": "nats", "top1_agreement": "share"}
    return [
        *(Check(f"{key}_on_{label}", value, None, units[key]) for key, value in values),
        *(
            Check(f"ppl_ratio_on_{label}_at_{one.start}_{one.end}", one.ppl_ratio, None, "ratio")
            for one in found.by_position
        ),
    ]


def kvcache(teacher: Model, student: Model, config: KVCacheVerifyConfig) -> tuple[Check, ...]:
    """Fill a cache of exactly `config.tokens` tokens with each model and count its buffers.

    `plan_difference` is |counted - planned| bytes per token of the student and has to be 0, the plan being what
    `caramba compile` prints.
    """
    theirs, _ = bytes_per_token(teacher, config)
    ours, layers = bytes_per_token(student, config)
    planned = float(model_cost(student.spec).kv_bytes_per_token(config.kind))
    checks = (
        Check("bytes_per_token", ours, config.max_bytes_per_token, "bytes"),
        Check("teacher_bytes_per_token", theirs, None, "bytes"),
        Check("ratio", theirs / ours, config.min_ratio, "ratio", is_minimum=True),
        Check("plan_difference", abs(ours - planned), 0.0, "bytes"),
    )
    each = [Check(f"bytes_per_token_layer{index}", size, None, "bytes") for index, size in enumerate(layers)]
    return (*checks, *each)


@torch.inference_mode()
def bytes_per_token(model: Model, config: KVCacheVerifyConfig) -> tuple[float, tuple[float, ...]]:
    """Return the bytes that a token takes in all buffers together, and in those of each attention application.

    Of a quantised cache that is what a token takes for good; its 16-bit tail does not grow with the sequence.
    """
    device = model.embedder.token.weight.device
    tokens = torch.arange(config.tokens, device=device).remainder(model.spec.embedder.vocab_size)[None]
    context = model.new_context(1, config.tokens, config.kind, static=True)
    prefill(model, tokens, context)
    layers = tuple(float(cache.bytes_per_token) for cache in context.caches)
    return float(context.bytes_per_token), layers


OpenWindows = Callable[[str, int], TokenDataset]


def verify(
    configs: Sequence[VerifyConfig],
    teacher: Model,
    student: Model,
    windows: OpenWindows,
    *,
    run_id: str,
    device: torch.device,
    tokenizer: Tokenizer | None = None,
) -> tuple[Verdict, ...]:
    """Run each verification in order. Thresholds are checked by the caller, once every verdict is recorded.

    Args:
        windows: returns the windows of split `train` or `val` at a block size.
        tokenizer: that of the run's data, which eval asks with unless it names another.

    Raises:
        ConfigError: an eval that does not fit the models (see `prepare`).
        VerificationFailed: a difference that is not a number.
    """
    verdicts = []
    for config in configs:
        cases: tuple[Case, ...] = ()
        if isinstance(config, CompareVerifyConfig):
            checks = compare(teacher, student, windows("val", config.block_size), config, device)
        elif isinstance(config, FidelityVerifyConfig):
            split = "val" if config.split == "auto" else config.split
            checks = fidelity(teacher, student, windows(split, config.block_size), config, device, tokenizer)
        elif isinstance(config, EvalVerifyConfig):
            chosen, encoded = prepare_verification(config, tokenizer, (teacher.spec, student.spec))
            checks, cases = ask(config, encoded, {TEACHER: teacher, STUDENT: student}, chosen)
        elif isinstance(config, OwnCheckConfig):
            checks = own_check(config, teacher, student, partial(windows, "val"))
        else:
            checks = kvcache(teacher, student, config)
        for item in checks:
            if not math.isfinite(item.value):
                raise VerificationFailed(
                    f"verify {config.type} after {run_id}: {item.name} is {item.value}; the student diverged, lower lr"
                )
        verdicts.append(Verdict(config.type, run_id, checks, config.fail_fast, cases))
    return tuple(verdicts)


def prepare_verification(
    config: EvalVerifyConfig, tokenizer: Tokenizer | None, specs: Sequence[ModelSpec]
) -> tuple[Tokenizer, tuple[EncodedCase, ...]]:
    """Return the tokenizer of an eval and its cases as token ids; without a model, so before a run trains.

    Raises:
        ConfigError: no tokenizer, or cases that do not fit what the models read.
        DataError: the named tokenizer cannot be read.
    """
    chosen = load_tokenizer(config.tokenizer) if config.tokenizer is not None else tokenizer
    if chosen is None:
        raise ConfigError(
            "verify eval: the run's data does not say which tokenizer made it; set tokenizer to `byte`, a folder with "
            "tokenizer.json, or a tokenizer file, or use a token folder (caramba prepare)"
        )
    learned = [spec.embedder.max_positions for spec in specs if spec.embedder.max_positions is not None]
    return chosen, encode_cases(
        config,
        chosen,
        vocab_size=min(spec.embedder.vocab_size for spec in specs),
        max_positions=min(learned, default=None),
    )
