"""Surgery: a student's weights from its teacher's."""

from caramba.upcycle.budget import allocate, fit_widths
from caramba.upcycle.calibration import (
    LONGEST_WINDOW,
    Calibration,
    CalibrationText,
    calibrate,
    choose_windows,
)
from caramba.upcycle.collect import refuse_short_windows
from caramba.upcycle.transplant import CALIBRATED, check_models, pair_attention, transplant
from caramba.upcycle.weight_svd import weight_svd

__all__ = [
    "CALIBRATED",
    "LONGEST_WINDOW",
    "Calibration",
    "CalibrationText",
    "allocate",
    "calibrate",
    "check_models",
    "choose_windows",
    "fit_widths",
    "pair_attention",
    "refuse_short_windows",
    "transplant",
    "weight_svd",
]
