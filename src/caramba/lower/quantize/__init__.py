"""Weights in 8 and 4 bits: which layers, through torchao, with what ranges, and how many bytes are left."""

from caramba.lower.quantize.calibrate import Ranges as Ranges
from caramba.lower.quantize.calibrate import observe_ranges as observe_ranges
from caramba.lower.quantize.weights import QuantisedWeights as QuantisedWeights
from caramba.lower.quantize.weights import format_refusal as format_refusal
from caramba.lower.quantize.weights import quantise_weights as quantise_weights
