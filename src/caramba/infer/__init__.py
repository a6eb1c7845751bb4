"""Inference: opening a trained model, prefill and decode with a cache, scores of given text."""

from caramba.infer.decode import decode_step, greedy, prefill
from caramba.infer.opened import OpenedModel, open_model
from caramba.infer.scoring import Scored, greedy_until, score_continuations

__all__ = [
    "OpenedModel",
    "Scored",
    "decode_step",
    "greedy",
    "greedy_until",
    "open_model",
    "prefill",
    "score_continuations",
]
