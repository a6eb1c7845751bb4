"""`--cfg job`: the composed configuration as YAML, before validation; of a sweep one document for each point."""

from __future__ import annotations

from omegaconf import OmegaConf

from caramba.config.lower import keeps_checks
from caramba.config.narrowing import mapping_of
from caramba.errors import ConfigError
from caramba.launch.argv import Request
from caramba.launch.compose import compose


def show_config(request: Request) -> int:
    """Print what the overrides compose to; `--resolve` replaces references by their values.

    Raises:
        ConfigError: another part than `job`, or a search, whose points are not known before it runs.
    """
    if request.cfg != "job":
        raise ConfigError(
            f"--cfg {request.cfg}: only `job` is shown; Hydra's own settings are fixed (--info shows them)"
        )
    if not request.is_multirun:
        print(_text(request, request.overrides), end="")
        return 0
    searches = [word for word in request.overrides if word.lstrip("+").startswith("hydra/sweeper=")]
    if searches:
        raise ConfigError(
            f"--cfg job: {searches[0]} draws its points from what earlier ones measured; leave it and -m out, and give "
            "each key one value"
        )
    from caramba.launch.axes import points

    for words in points(request.overrides, request.config_dirs):
        print(f"---\n# {' '.join(words)}\n{_text(request, words)}", end="")
    return 0


def _text(request: Request, words: list[str]) -> str:
    composed = compose(words, request.config_dirs)
    tree = composed.tree if request.resolves else composed.raw
    verify = mapping_of(tree.get("verify"))
    if verify.get("checks") and not keeps_checks(composed.tree, composed.given, composed.chosen):
        tree = {**tree, "verify": {**verify, "checks": []}}
    return OmegaConf.to_yaml(OmegaConf.create(tree))
