"""What holds for every test."""

from __future__ import annotations

import os

# Tensors of the tests are tiny: more threads would wait for each other. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
