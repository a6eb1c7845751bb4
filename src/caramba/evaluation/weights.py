"""What weights of 8 and 4 bits cost in held-out NLL and save in bytes, against the same model in 16 bits."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from caramba.config.benchmark import WeightFormat, WeightsBenchmarkConfig
from caramba.data import spread_windows
from caramba.errors import CarambaError, ConfigError, KernelUnavailable
from caramba.evaluation.subject import Subjects
from caramba.infer.nll import WindowedNLL, windowed_nll
from caramba.lower.quantize import Ranges, format_refusal, linear_layers, observe_ranges, quantise_weights
from caramba.model import Model
from caramba.model.model import model_bytes
from caramba.result import Metric

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {
    "nll": "nats/token",
    "perplexity": "",
    "delta_nll": "nats/token",
    "ppl_ratio": "ratio",
    "weight_bytes": "bytes",
    "bytes_ratio": "ratio",
}


def weights(
    config: WeightsBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Measure every model in 16 bits and in each format on the same windows.

    A format without a kernel, or without a layer of the model's to quantise, is a row with the reason.

    `delta_nll` is NLL minus that of 16 bits, `standard_error` that of the windows' differences; `weight_bytes` are
    those of all parameters and buffers.
    """
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        plain = copy.deepcopy(model).eval().to(DTYPES[config.dtype])
        base, size = _nll(plain, config, subjects), model_bytes(plain)
        rows.append({"model": name, "weights": config.dtype} | _values(base, base, size, size))
        for text in config.formats:
            form = WeightFormat(text)
            row: dict[str, Any] = {"model": name, "weights": text}
            reason = format_refusal(form, subjects.device)
            if reason is not None:
                rows.append(row | {"skipped": reason})
                continue
            changed = copy.deepcopy(plain)
            ranges = _ranges(changed, form, config, subjects)
            try:
                done = quantise_weights(changed, form, with_head=config.head, ranges=ranges).record()
            except (
                ConfigError,
                KernelUnavailable,
            ) as refusal:  # of this model, or of layers that ranks share
                rows.append(row | {"skipped": str(refusal)})
                continue
            found = _nll(changed, config, subjects)
            rows.append(row | _values(found, base, done["bytes_after"], size) | _of(done))
    for row in rows:
        if row.get("skipped") is None:
            metrics += [
                Metric(
                    f"weights.{row['model']}.{key}@weights={row['weights']}",
                    row[key],
                    unit,
                    row["windows"],
                    None,
                    source,
                    row["delta_standard_error"] if key == "delta_nll" else None,
                )
                for key, unit in UNITS.items()
            ]
    return metrics, rows


def _ranges(model: Model, form: WeightFormat, config: WeightsBenchmarkConfig, subjects: Subjects) -> Ranges | None:
    if form is not WeightFormat.INT8_DYNAMIC:
        return None
    found = linear_layers(model, form, subjects.device, with_head=config.head)
    return observe_ranges(model, found.layers, calibration_text(config, subjects), config.calibration)


def calibration_text(config: WeightsBenchmarkConfig, subjects: Subjects) -> list[Tensor]:
    """Return windows of the training text: ranges from the windows that judge would flatter the format.

    Raises:
        CarambaError: there is none.
    """
    if subjects.train_windows is None:
        raise CarambaError("weights=int8_dynamic: no training text to take the ranges of activations from")
    dataset = subjects.train_windows(config.block_size)
    wanted = -(-config.calibration.tokens // config.block_size)
    windows = [dataset[index][0] for index in spread_windows(len(dataset), wanted)]
    last = config.calibration.tokens - config.block_size * (wanted - 1)
    return [*windows[:-1], windows[-1][:last]] if len(windows) == wanted else windows


def _nll(model: Model, config: WeightsBenchmarkConfig, subjects: Subjects) -> WindowedNLL:
    measured = windowed_nll(
        model,
        subjects.windows(config.block_size),
        windows=config.num_batches * config.batch_size,
        batch_size=config.batch_size,
        device=subjects.device,
    )
    if not math.isfinite(measured.mean):
        raise CarambaError(f"weights: the held-out NLL is {measured.mean}; the model diverged, or overflows in fp16")
    return measured


def _values(found: WindowedNLL, base: WindowedNLL, size: int, base_size: int) -> dict[str, Any]:
    pairs = zip(found.window_means, base.window_means, strict=True)
    differences = [one - other for one, other in pairs]
    n = len(differences)
    return {
        "nll": found.mean,
        "perplexity": found.perplexity,
        "delta_nll": found.mean - base.mean,
        "delta_standard_error": statistics.stdev(differences) / math.sqrt(n) if n > 1 else None,
        "ppl_ratio": math.exp(found.mean - base.mean),
        "weight_bytes": size,
        "bytes_ratio": base_size / size,
        "windows": n,
        "tokens": found.tokens,
    }


def _of(done: dict[str, Any]) -> dict[str, Any]:
    return {key: done[key] for key in ("layers", "kept", "calibration_tokens")}
