"""Composition of the model presets for tests, through Hydra as a launch does it."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from caramba.config.manifest import Manifest
from caramba.config.model import ModelConfig

CONF = Path(__file__).parents[4] / "conf"
# These are described by a folder, not by their YAML: tests/integration/test_launch_hf.py and test_options.py have them.
OF_FOLDERS = ("hf", "hf_dba", "hf_memory", "smollm2_dba")
PRESETS = tuple(sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem not in OF_FOLDERS))

SMALL_WIDTH, SMALL_VOCAB, SMALL_DEPTH = 64, 512, 2


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


def shrunk_tree(preset: str) -> dict[str, Any]:
    """A preset's network alone at a width of 64 and two repeats at most; heads, widths and cache keep their proportions.

    A preset's teacher and surgery name weights that a network of another size cannot have, so they go.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = OmegaConf.to_container(compose(overrides=[f"+model={preset}"]), resolve=True)
    tree: dict[str, Any] = composed["model"]
    factor = max(1, tree["embedder"]["d_model"] // SMALL_WIDTH)
    kept = {key: tree[key] for key in ("embedder", "topology", "head") if key in tree}
    return {"name": "small", **_shrunk(kept, factor)}


def _shrunk(value: Any, factor: int) -> Any:
    if isinstance(value, list):
        return [_shrunk(item, factor) for item in value]
    if not isinstance(value, dict):
        return value
    small = {key: _shrunk(item, factor) for key, item in value.items()}
    for key in ("d_model", "d_ff", "d_in", "d_out"):
        if value.get(key):
            small[key] = value[key] // factor
    if "vocab_size" in value:
        small["vocab_size"] = SMALL_VOCAB
    if "repeat" in value:
        small["repeat"] = min(value["repeat"], SMALL_DEPTH)
    if "n_heads" in value:
        kv_heads = value.get("n_kv_heads") or value["n_heads"]
        fewer = math.gcd(factor, kv_heads)
        small |= {key: value[key] // fewer for key in ("n_heads", "n_kv_heads") if value.get(key)}
        if value.get("head_dim"):
            small["head_dim"] = max(2, value["head_dim"] // (factor // fewer) // 2 * 2)  # whole pairs for RoPE
        unit = 2 * (kv_heads // fewer)  # whole pairs for RoPE in every head
        for key in ("sem_dim", "geo_dim", "v_dim", "attn_dim"):
            if value.get(key):
                small[key] = math.ceil(value[key] / factor / unit) * unit
    return small
