"""Checks of custom layers that need more than a forward over whole sequences; refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from caramba.config.benchmark import (
    BenchmarkKind,
    InferenceLadderConfig,
    LatencyBenchmarkConfig,
    MemoryBenchmarkConfig,
    PerplexityBenchmarkConfig,
)
from caramba.config.eval_cases import EvalVerifyConfig, IntGreedyCase
from caramba.config.layer_base import LayerConfig
from caramba.config.manifest import GroupConfig, Manifest, RunConfig
from caramba.config.own_layer import custom_layers
from caramba.config.verify import KVCacheVerifyConfig, VerifyConfig
from caramba.errors import ConfigError, quote

PATHS = {"student": "model.topology", "teacher": "model.teacher.manifest.topology"}
DECODING_BENCHMARKS = (LatencyBenchmarkConfig, MemoryBenchmarkConfig, InferenceLadderConfig)


def custom_layers_by_role(manifest: Manifest) -> dict[str, list[tuple[str, LayerConfig]]]:
    """Return (path, layer) of the custom layers in a manifest's student and, if it has one, its teacher."""
    teacher = manifest.model.teacher.manifest if manifest.model.teacher is not None else None
    specs = {"student": manifest.model, "teacher": teacher}
    return {
        role: list(custom_layers(spec.topology, PATHS[role]))
        for role, spec in specs.items()
        if spec is not None
    }


def check_custom_layers(manifest: Manifest) -> None:
    """Refuse to decode models that cannot decode, and separate documents in layers that may mix them.

    Raises:
        ConfigError: naming what decodes, the layer and the fixes.
    """
    layers = custom_layers_by_role(manifest)
    undecodable = {
        role: next(((path, layer) for path, layer in found if layer.decoding == "refused"), None)
        for role, found in layers.items()
    }
    for group in manifest.groups_to_run():
        for what, roles in _decoders(group):
            for role in roles:
                found = undecodable.get(role)
                if found is not None:
                    path, layer = found
                    raise ConfigError(
                        f"{what} decodes token by token, and {path} is a {layer.type}, which does not say how it is "
                        f'decoded; set decoding = "per_token" or "cached" in {type(layer).__name__}, or remove what '
                        "decodes (benchmark=none)"
                    )
        if not group.data.keeps_documents_apart:
            continue
        mixing = [item for found in layers.values() for item in found if item[1].decoding != "per_token"]
        if mixing and (group.runs or group.benchmarks):
            path, layer = mixing[0]
            raise ConfigError(
                f"group {group.name!r}: data.packing or data.document_mask separates documents, and {path} is a "
                f"{layer.type}, which may look at other tokens and so across documents; leave documents joined, or set "
                f'decoding = "per_token" in {type(layer).__name__} if it looks at none'
            )


def _decoders(group: GroupConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what decodes in a group, and the models that it decodes."""
    both = ("student", "teacher")
    for run in group.runs:
        yield from _decoding_runs(run)
        for check in run.verify:
            if _check_decodes(check):
                yield f"run {run.id!r}: verify {check.type}", both
    for bench in group.benchmarks:
        if _benchmark_decodes(bench.config):
            yield f"benchmark {quote(bench.id)} ({bench.config.type})", bench.models


def _decoding_runs(run: RunConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    if run.sample is not None:
        yield f"run {run.id!r}: mode=sample", (run.sample.role,)
    elif run.mode == "chat":
        yield f"run {run.id!r}: mode=chat", (run.chat.role if run.chat is not None else "student",)


def _check_decodes(check: VerifyConfig) -> bool:
    if isinstance(check, EvalVerifyConfig):
        return any(isinstance(case, IntGreedyCase) for case in check.cases)
    return isinstance(check, KVCacheVerifyConfig)


def _benchmark_decodes(config: BenchmarkKind) -> bool:
    if isinstance(config, PerplexityBenchmarkConfig):
        return config.cache_kind is not None
    return isinstance(config, DECODING_BENCHMARKS)
