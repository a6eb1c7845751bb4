"""Optimisers, clipping, learning-rate schedules and averages of weights."""

from caramba.optim.adagc import AdaGC as AdaGC
from caramba.optim.adamw import AdamW as AdamW
from caramba.optim.average import WeightAverage as WeightAverage
from caramba.optim.build import build_optimizer as build_optimizer
from caramba.optim.build import learning_rate as learning_rate
from caramba.optim.clip import NONFINITE as NONFINITE
from caramba.optim.clip import NonFiniteWatch as NonFiniteWatch
from caramba.optim.clip import clip_gradients as clip_gradients
from caramba.optim.clip import clip_values as clip_values
from caramba.optim.clip import clipping_step as clipping_step
from caramba.optim.groups import LR_MULT as LR_MULT
from caramba.optim.groups import check_lr_mult as check_lr_mult
from caramba.optim.groups import local as local
from caramba.optim.lion import Lion as Lion
from caramba.optim.master_weights import MasterWeights as MasterWeights
