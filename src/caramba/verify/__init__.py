"""Is the student its teacher? Thresholded checks on held-out text."""

from caramba.verify.check import check

__all__ = ["check"]
