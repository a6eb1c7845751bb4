"""`--cfg job`: the composed configuration as YAML, before validation."""

from __future__ import annotations

from omegaconf import OmegaConf

from caramba.errors import ConfigError
from caramba.launch.argv import Request
from caramba.launch.compose import compose


def show_config(request: Request) -> int:
    """Print what the overrides compose to; `--resolve` replaces references by their values."""
    if request.cfg != "job":
        raise ConfigError(
            f"--cfg {request.cfg}: only `job` is shown; Hydra's own settings are fixed (--info shows them)"
        )
    composed = compose(request.overrides, request.config_dirs)
    tree = composed.tree if request.resolves else composed.raw
    print(OmegaConf.to_yaml(OmegaConf.create(tree)), end="")
    return 0
