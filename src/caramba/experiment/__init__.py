"""The pipeline of a manifest: train, verify, benchmark, write."""

from caramba.experiment.run import run

__all__ = ["run"]
