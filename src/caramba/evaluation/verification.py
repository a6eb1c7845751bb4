"""Run the verifications of a run and hold their thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from caramba.config.extension import OwnCheckConfig
from caramba.config.model import ModelSpec
from caramba.config.verify import CompareVerifyConfig, EvalVerifyConfig, FidelityVerifyConfig, VerifyConfig
from caramba.data import TokenDataset, Tokenizer, load_tokenizer
from caramba.errors import ConfigError, VerificationFailed
from caramba.evaluation.compare import compare
from caramba.evaluation.eval_case_runner import STUDENT, TEACHER, EncodedCase, ask, encode_cases
from caramba.evaluation.fidelity import fidelity
from caramba.evaluation.kvcache import kvcache
from caramba.evaluation.own import own_check
from caramba.model import Model
from caramba.result import Case, Verdict

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
