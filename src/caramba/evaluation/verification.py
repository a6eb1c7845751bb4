"""The verifications of a run: distances, fidelity and cache bytes of a student against its teacher, with bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from caramba.config.estimate import model_cost
from caramba.config.extension import OwnCheckConfig
from caramba.config.model import ModelSpec
from caramba.config.verify import (
    CompareVerifyConfig,
    EvalVerifyConfig,
    FidelityVerifyConfig,
    KVCacheVerifyConfig,
    VerifyConfig,
)
from caramba.data import (
    TokenDataset,
    Tokenizer,
    Windows,
    batches,
    documents_of,
    load_tokenizer,
    spread_windows,
)
from caramba.errors import ConfigError, VerificationFailed
from caramba.evaluation.eval_case_runner import STUDENT, TEACHER, EncodedCase, ask, encode_cases
from caramba.evaluation.other_text import check_other_texts, label_of, open_other_text
from caramba.evaluation.own import own_check
from caramba.infer import prefill
from caramba.infer.agreement import Agreement, agreement
from caramba.layer import AttentionLayer
from caramba.model import Model, Trace
from caramba.result import Case, Check, Verdict
from caramba.runtime.device import wide_dtype


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
