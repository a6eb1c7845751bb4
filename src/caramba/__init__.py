"""caramba: a Hydra-composed experiment launcher for research on neural architectures."""

__version__ = "0.1.0"
