"""Inference: opening a trained model, generating text, prefill and decode with a cache, scores of given text."""

from caramba.config.generate import GenerateConfig, SpeculativeConfig
from caramba.infer.decode import decode_step, greedy, prefill
from caramba.infer.generator import Generated, GenerateStats, Generator, generate
from caramba.infer.held_out import HeldOut
from caramba.infer.opened import OpenedModel, open_model
from caramba.infer.policy import CacheDecision
from caramba.infer.scoring import Scored, greedy_until, score_continuations
from caramba.infer.speculative import SpeculativeGenerator

__all__ = [
    "CacheDecision",
    "GenerateConfig",
    "GenerateStats",
    "Generated",
    "Generator",
    "HeldOut",
    "OpenedModel",
    "Scored",
    "SpeculativeConfig",
    "SpeculativeGenerator",
    "decode_step",
    "generate",
    "greedy",
    "greedy_until",
    "open_model",
    "prefill",
    "score_continuations",
]
