"""The only package that knows Lightning: one phase of training."""

from caramba.train.callbacks import BenchmarkArtifacts as BenchmarkArtifacts
from caramba.train.callbacks import BlockwiseDistillation as BlockwiseDistillation
from caramba.train.callbacks import Verification as Verification
from caramba.train.data import workers_needed as workers_needed
from caramba.train.module import CarambaModule as CarambaModule
from caramba.train.strategies import SHARDED as SHARDED
from caramba.train.strategies import STAGED as STAGED
from caramba.train.strategies import strategy_for as strategy_for
from caramba.train.trainer import FitOutcome as FitOutcome
from caramba.train.trainer import PhaseData as PhaseData
from caramba.train.trainer import drop_state as drop_state
from caramba.train.trainer import fit as fit
from caramba.train.trainer import has_saved_state as has_saved_state
from caramba.train.trainer import state_path as state_path
