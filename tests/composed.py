"""Compose and check one manifest when imported: what forked commands would each build first, they have.

Hydra's parsers and pydantic's validators take longer to build than most of the tests' commands take to run.
"""

from __future__ import annotations

from caramba.launch.freeze import freeze

freeze(["experiment=smoke"])
