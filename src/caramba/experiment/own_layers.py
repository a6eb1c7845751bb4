"""Layers of somebody's own, each built once without memory before a run reads its data, which may take long."""

from __future__ import annotations

import torch

from caramba.config.decoding import custom_layers_by_role
from caramba.config.manifest import Manifest
from caramba.errors import ConfigError
from caramba.model.topology import build_node


def check_builds(manifest: Manifest) -> None:
    """Build every layer of somebody's own that a manifest describes, on the meta device.

    Raises:
        ConfigError: a target that is no torch module, a constructor that fails, or parameters other than declared, with
            the layer's path.
    """
    for layers in custom_layers_by_role(manifest).values():
        for path, layer in layers:
            try:
                with torch.device("meta"):
                    build_node(layer)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from error.__cause__
