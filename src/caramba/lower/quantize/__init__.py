"""Weights in 8 and 4 bits: which layers, through torchao, with what ranges, and how many bytes are left."""

from caramba.lower.quantize.calibrate import Ranges, observe_ranges
from caramba.lower.quantize.library import format_refusal
from caramba.lower.quantize.weights import QuantisedWeights, quantise_weights

__all__ = ["QuantisedWeights", "Ranges", "format_refusal", "observe_ranges", "quantise_weights"]
