"""Optional libraries that settings need: asked for before a run starts. No torch, and none of them is imported."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

from caramba.errors import ConfigError

OLDEST_HARNESS = (0, 4, 13)


def need_harness(where: str) -> None:
    """Refuse when lm-evaluation-harness is not here, or is one that cannot be imported with transformers 5.

    Raises:
        ConfigError: naming the extra to install; `where` names what needs it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"{where}: lm-evaluation-harness is not installed; pip install 'caramba[eval]', or leave it out"
        )
    found = tuple(int(part) for part in version("lm_eval").split(".")[:3] if part.isdigit())
    if found < OLDEST_HARNESS:
        raise ConfigError(
            f"{where}: lm-evaluation-harness {version('lm_eval')} cannot be imported with transformers 5; "
            "pip install -U 'caramba[eval]'"
        )


def need_library(module: str, extra: str, where: str) -> None:
    """Refuse when an optional library is not here.

    Raises:
        ConfigError: naming the extra to install; `where` names what needs it.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{where}: {module} is not installed; pip install 'caramba[{extra}]', or leave it out")
