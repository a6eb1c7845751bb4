"""A student from its teacher in one call, on torch modules: calibration, widths, weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba.config.model import ModelConfig, ModelSpec, SurgeryConfig
from caramba.config.parse import parse_as
from caramba.config.surgery import first_tokens_apart
from caramba.errors import ConfigError
from caramba.model import Model
from caramba.result import TransplantReport
from caramba.surgery.calibration import Calibration, CalibrationText, calibrate, choose_windows
from caramba.surgery.collect import refuse_short_windows
from caramba.surgery.transplant import CALIBRATED, build_student


def transplant(
    teacher: Model,
    student: ModelConfig | ModelSpec | Mapping[str, Any],
    tokens: Tensor | None = None,
    *,
    surgery: SurgeryConfig | Mapping[str, Any] | None = None,
    seed: int = 1337,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Model, TransplantReport]:
    """Return a student with weights from its teacher, and the report of every weight.

    Args:
        teacher: any caramba model; it is put in eval mode.
        student: the student's network, such as `caramba.compile(["model=tiny_dba"]).manifest.model`.
        tokens: windows [N, T] int64 of training text, which `method=dba` measures the teacher on.
        surgery: method and widths; by default those of `student`.
        seed: of weights that the teacher does not give.
        cache: folder that stores the statistics for the next call.
        progress: called with lines for people.

    Raises:
        ConfigError: the models do not pair, the method does not map a part, or tokens are missing or too short.
    """
    config = parse_as(ModelConfig, dict(student)) if isinstance(student, Mapping) else student
    chosen = parse_as(SurgeryConfig, dict(surgery)) if isinstance(surgery, Mapping) else surgery
    chosen = chosen or (config.surgery if isinstance(config, ModelConfig) else None) or SurgeryConfig()
    teacher.eval()
    calibration = None
    if chosen.method in CALIBRATED:
        calibration = _calibrate(teacher, config, chosen, tokens, cache, progress)
    return build_student(teacher, config, chosen, calibration, seed)


def _calibrate(
    teacher: Model,
    config: ModelSpec,
    surgery: SurgeryConfig,
    tokens: Tensor | None,
    cache: Path | None,
    progress: Callable[[str], None] | None,
) -> Calibration:
    if tokens is None or tokens.dim() != 2 or tokens.dtype != torch.int64:
        got = "none" if tokens is None else f"{tokens.dtype} {tuple(tokens.shape)}"
        raise ConfigError(f"transplant: method={surgery.method} measures the teacher on tokens [N, T] int64; got {got}")
    first = first_tokens_apart(config.topology)
    refuse_short_windows(tokens.shape[1], first)
    measured, held = choose_windows(len(tokens), tokens.shape[1], surgery.calibration_tokens)
    text = CalibrationText(tokens[measured], tokens[held])
    return calibrate(teacher, text, first_tokens=first, cache=cache, progress=progress)
