"""The front end: composes an experiment with Hydra, validates it, freezes it, and hands the file to a worker.

`python -m caramba.launch [overrides]`; from Python, `caramba.launch([overrides])`. Nothing here loads torch, and
nothing is written before all of it is valid.
"""

from __future__ import annotations

import sys

from caramba import CallablePackage
from caramba.launch.commands.launch import run as main

__all__ = ["main"]

sys.modules[__name__].__class__ = CallablePackage
