"""Surgery: a student's weights from its teacher's."""

from caramba.model import pair_attention as pair_attention
from caramba.surgery.budget import allocate as allocate
from caramba.surgery.budget import fit_widths as fit_widths
from caramba.surgery.calibration import LONGEST_WINDOW as LONGEST_WINDOW
from caramba.surgery.calibration import Calibration as Calibration
from caramba.surgery.calibration import CalibrationText as CalibrationText
from caramba.surgery.calibration import calibrate as calibrate
from caramba.surgery.calibration import choose_windows as choose_windows
from caramba.surgery.collect import refuse_short_windows as refuse_short_windows
from caramba.surgery.sensitivity import HeldOutKL as HeldOutKL
from caramba.surgery.transplant import CALIBRATED as CALIBRATED
from caramba.surgery.transplant import build_student as build_student
from caramba.surgery.transplant import check_models as check_models
from caramba.surgery.transplant import transplant as transplant
