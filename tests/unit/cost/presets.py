"""Composition of the model presets for tests, through Hydra as a launch does it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from caramba.config.manifest import Manifest
from caramba.config.model import ModelConfig

CONF = Path(__file__).parents[3] / "conf"
# hf is described by a folder, not by its YAML: tests/unit/hf and tests/unit/launch have it.
PRESETS = tuple(sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "hf"))


@functools.cache
def compose_model(preset: str, *overrides: str) -> ModelConfig:
    """Compose and validate conf/model/PRESET.yaml with overrides such as `model.surgery.geo_dim=64`."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose(overrides=[f"+model={preset}", *overrides])
    return ModelConfig.model_validate(OmegaConf.to_container(tree, resolve=True)["model"])


def phase(name: str, **fields: Any) -> dict[str, Any]:
    """Return a run of one phase."""
    return {"id": name, "train": {"phase": name, "steps": 10, "batch_size": 4, "block_size": 64, **fields}}


def manifest(preset: str, *runs: dict[str, Any], **group: Any) -> Manifest:
    """Return a manifest of one group around a preset."""
    model = compose_model(preset)
    data = {"vocab_size": model.embedder.vocab_size}
    groups = [{"name": "main", "data": data, "runs": list(runs), **group}]
    return Manifest.model_validate({"name": f"{preset}_test", "model": model, "groups": groups})
