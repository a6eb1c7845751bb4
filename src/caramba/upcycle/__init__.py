"""Surgery: a student's weights from its teacher's."""

from caramba.upcycle.transplant import METHODS, pair_attention, transplant
from caramba.upcycle.weight_svd import weight_svd

__all__ = ["METHODS", "pair_attention", "transplant", "weight_svd"]
