"""Surgery: a student's weights from its teacher's."""

from caramba.model import pair_attention
from caramba.surgery.budget import allocate, fit_widths
from caramba.surgery.calibration import (
    LONGEST_WINDOW,
    Calibration,
    CalibrationText,
    calibrate,
    choose_windows,
)
from caramba.surgery.collect import refuse_short_windows
from caramba.surgery.sensitivity import HeldOutKL
from caramba.surgery.transplant import CALIBRATED, build_student, check_models, transplant
from caramba.surgery.weight_svd import weight_svd

__all__ = [
    "CALIBRATED",
    "LONGEST_WINDOW",
    "Calibration",
    "CalibrationText",
    "HeldOutKL",
    "allocate",
    "build_student",
    "calibrate",
    "check_models",
    "choose_windows",
    "fit_widths",
    "pair_attention",
    "refuse_short_windows",
    "transplant",
    "weight_svd",
]
