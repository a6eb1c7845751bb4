"""Custom layers, each built once without memory before a run reads its data, which may take long."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from caramba.config.crosscheck import custom_layers_by_role
from caramba.config.extension import ExtensionConfig
from caramba.config.manifest import Manifest
from caramba.errors import ConfigError
from caramba.model.topology import build_node


def check_builds(manifest: Manifest) -> None:
    """Build every custom layer that a manifest describes, on the meta device, and import its extensions.

    Raises:
        ConfigError: a target that is no torch module, a constructor that fails, or parameters other than declared, with
            the layer's path; or an extension that is not of its kind, with the expected signature.
    """
    for layers in custom_layers_by_role(manifest).values():
        for path, layer in layers:
            try:
                with torch.device("meta"):
                    build_node(layer)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from error.__cause__
    if manifest.logger.lightning:
        from caramba.train.loggers.named import check_named_loggers

        check_named_loggers(manifest.logger.lightning)
    for extension in _extensions(manifest):
        from caramba.config.extension_target import load_class

        load_class(extension)


def _extensions(manifest: Manifest) -> Iterator[ExtensionConfig]:
    yield from (*manifest.callbacks, *manifest.logger.extra)
    for group in manifest.groups_to_run():
        checks = [check for run in group.runs for check in run.verify]
        for extension in (group.data.source, *(bench.config for bench in group.benchmarks), *checks):
            if isinstance(extension, ExtensionConfig):
                yield extension
        for phase in (run.train for run in group.runs if run.train is not None):
            for extension in (phase.loss, phase.optimizer, phase.scheduler):
                if isinstance(extension, ExtensionConfig):
                    yield extension
