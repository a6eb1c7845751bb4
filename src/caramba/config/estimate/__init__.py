"""What an experiment will cost, before it runs and without torch: widths, FLOPs, bytes, memory, stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.config.estimate.fit import FitResult as FitResult
from caramba.config.estimate.fit import FitRow as FitRow
from caramba.config.estimate.fit import fit as fit
from caramba.config.estimate.memory import ParallelLayout as ParallelLayout
from caramba.config.estimate.memory import estimate_phase as estimate_phase
from caramba.config.estimate.memory import rank_bytes as rank_bytes
from caramba.config.estimate.model import ModelCost as ModelCost
from caramba.config.estimate.model import check_widths as check_widths
from caramba.config.estimate.model import model_cost as model_cost
from caramba.config.estimate.planning import ExperimentPlan as ExperimentPlan
from caramba.config.estimate.planning import plan as plan
from caramba.config.estimate.variants import check_variants as check_variants
from caramba.config.estimate.variants import variant as variant
from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.config.estimate.export import as_json as as_json
    from caramba.config.estimate.rendering import render as render
    from caramba.config.estimate.rendering import render_text as render_text

# Rich takes a while to import, and a launch that only checks widths prints nothing with it.
__getattr__ = lazy_exports(__name__, __file__)
