"""Research on a run: a registered test, a ledger that can be recomputed, and the runs that they decide on."""

from __future__ import annotations
