"""Inference: prefill and decode with a cache."""

from caramba.infer.decode import decode_step, greedy, prefill

__all__ = ["decode_step", "greedy", "prefill"]
