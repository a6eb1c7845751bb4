"""Is the student its teacher? Thresholded checks on held-out text, on questions, and of cache bytes."""

from caramba.verify.check import check, prepare

__all__ = ["check", "prepare"]
