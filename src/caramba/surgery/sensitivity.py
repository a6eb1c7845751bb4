"""Widths of every layer and one cache format under a budget of bytes, by the KL that each layer's choice costs alone.

The KL of a whole student is larger than the sum of its layers', so the chosen one is built, and its own KL on
held-out calibration text is what is predicted for other text.
"""

import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.config.kvcache import KVCacheKind, bytes_of_streams
from caramba.config.model import ModelSpec
from caramba.config.surgery import BYTES_PER_ELEMENT
from caramba.config.topology import attention_configs
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer
from caramba.model import Model
from caramba.ops.backend import upcast
from caramba.runs.files import write_json
from caramba.surgery.budget import STEPS, Choice, allocate, is_sane, lower_hull, unroll
from caramba.surgery.calibration import Calibration
from caramba.surgery.collect import LayerStatistics, batches
from caramba.surgery.dba import split_keys
from caramba.surgery.held_out import EvalWindows, latent_output
from caramba.surgery.latent import latent_maps

Curves = dict[str, list[list[Choice]]]
"""Choices of every layer, by format."""
CHUNK = 1024


class HeldOutKL:
    """KL(teacher || model) in nats per token of windows [n, T], of models and of replaced layer outputs."""

    @torch.no_grad()
    def __init__(self, teacher: Model, tokens: Tensor, documents: Tensor | None = None) -> None:
        self.teacher, self.tokens, self.documents = teacher, tokens, documents
        self.device = teacher.embedder.token.weight.device
        self.states = [teacher.hidden(x, documents=ids) for x, ids in self._batches()]

    def _batches(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        return batches(self.tokens, self.documents, self.device)

    @classmethod
    def on(cls, teacher: Model, calibration: Calibration, first: int | None = None) -> "HeldOutKL":
        """Measure on the held-out windows of a calibration, or on the first of them."""
        tokens, ids = calibration.tokens, calibration.documents
        if tokens is None:
            raise ConfigError("surgery.kv_budget_formats: the calibration has no held-out tokens; calibrate again")
        return cls(teacher, tokens[:first], None if ids is None else ids[:first])

    @torch.no_grad()
    def of(self, model: Model) -> float:
        """Return the KL of a whole model."""
        return self._mean(model, [model.hidden(x, documents=ids) for x, ids in self._batches()])

    def replacing(self, layer: AttentionLayer, output: Tensor) -> float:
        """Return the KL when a layer of the teacher gives `output` [N, T, M], without its bias."""
        place = 0

        def replace(_module: nn.Module, _inputs: object, found: Tensor) -> Tensor:
            nonlocal place
            part = output[place : place + len(found)].to(found.device, found.dtype)
            place += len(found)
            return part if layer.out.bias is None else part + layer.out.bias

        handle = layer.register_forward_hook(replace)
        try:
            return self._mean(self.teacher, [self.teacher.hidden(x, documents=i) for x, i in self._batches()])
        finally:
            handle.remove()

    @torch.no_grad()
    def _mean(self, model: Model, states: Sequence[Tensor]) -> float:
        total, n = 0.0, 0
        for (_, ids), theirs, ours in zip(self._batches(), self.states, states, strict=True):
            counted = torch.ones_like(theirs[..., 0], dtype=torch.bool) if ids is None else ids >= 0
            theirs, ours = theirs[counted], ours[counted]
            for start in range(0, len(ours), CHUNK):
                part = slice(start, start + CHUNK)
                log_p = F.log_softmax(upcast(self.teacher.logits(theirs[part])), dim=-1)
                log_q = F.log_softmax(upcast(model.logits(ours[part])), dim=-1)
                total += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
            n += len(ours)
        return total / n


@torch.no_grad()
def fit_budget(
    teacher: Model, spec: ModelSpec, calibration: Calibration, budget_bytes: int, formats: Sequence[str]
) -> ModelSpec:
    """Choose latent and rotary width of every layer and one cache format under `budget_bytes` a token of all layers.

    Each layer's choices that no other dominates in block error are measured by the KL that they alone cost. For each
    format the widths of least total are found, and the format of least total is taken.

    Args:
        formats: `fp16` or quantised formats.

    Raises:
        ConfigError: no format fits the budget, or a layer is not of the latent layout.
    """
    configs = attention_configs(spec.topology)
    if any(config.layout != "latent" for config in configs):
        raise ConfigError("surgery.kv_budget_formats: measures layout: latent alone; use it, or leave the key out")
    kinds, curves = kinds_of(formats), curves_of(teacher, spec, calibration, formats)
    chosen: dict[str, list[Choice]] = {}
    refusals: list[str] = []
    for name in formats:
        if not all(curves[name]):
            refusals.append(f"{name}: no width takes fewer bytes than the teacher's layer")
            continue
        try:
            chosen[name] = allocate(curves[name], budget_bytes, unit_bytes=1)
        except ConfigError as error:
            refusals.append(f"{name}: {error}")
    if not chosen:
        raise ConfigError("; ".join(refusals))
    sums = {name: sum(choice.damage for choice in choices) for name, choices in chosen.items()}
    best = min(sums, key=lambda name: sums[name])

    kind = kinds[best]
    found = [{**dict(choice.widths), "cache_format": None if kind is None else str(kind)} for choice in chosen[best]]
    others = ", ".join(f"{name} {value:.4g}" for name, value in sums.items())
    size = sum(choice.elements for choice in chosen[best])
    logger.info(
        f"kv_budget: {best}, widths by layer in {size:,} of {budget_bytes:,} bytes a token "
        f"(KL in nats, sums of single layers: {others})"
    )
    return spec.model_copy(update={"topology": unroll(spec.topology, iter(found))})


def kinds_of(formats: Sequence[str]) -> dict[str, KVCacheKind | None]:
    """Return the cache kind of each format, None for 16 bits."""
    return {name: None if name == "fp16" else KVCacheKind(name) for name in formats}


def curves_of(teacher: Model, spec: ModelSpec, calibration: Calibration, formats: Sequence[str]) -> Curves:
    """Return, for each format and layer, bytes and KL of choices that take fewer bytes than the teacher's layer.

    They are kept next to the calibration's statistics, so that another budget measures nothing.
    """
    path = calibration.path and calibration.path.with_suffix(f".{'-'.join(sorted(formats))}.v1.json")
    if path is not None and path.is_file():
        logger.info(f"kv_budget: choices read from {path}")
        return {
            name: [
                [Choice(size, kl, tuple((key, n) for key, n in widths)) for size, kl, widths in curve]
                for curve in layers
            ]
            for name, layers in json.loads(path.read_text(encoding="utf-8")).items()
        }
    curves = _measure_curves(teacher, spec, calibration, formats)
    if path is not None:
        write_json(
            path,
            {
                name: [[(choice.elements, choice.damage, choice.widths) for choice in curve] for curve in layers]
                for name, layers in curves.items()
            },
        )
    return curves


@torch.no_grad()
def _measure_curves(teacher: Model, spec: ModelSpec, calibration: Calibration, formats: Sequence[str]) -> Curves:
    measure = HeldOutKL.on(teacher, calibration, len(calibration.held_out[0].output))
    layers, kinds = teacher.attention_layers(), kinds_of(formats)
    curves: Curves = {name: [] for name in formats}
    for number, ((_, layer), config) in enumerate(zip(layers, attention_configs(spec.topology), strict=True), start=1):
        found = _curves(layer, *calibration.of(layer), measure, kinds, config.exact_first_tokens)
        for name, curve in found.items():
            curves[name].append(curve)
        n_choices = sum(map(len, found.values()))
        logger.info(f"kv_budget: layer {number} of {len(layers)} measured, {n_choices} choices")
    return curves


def _curves(
    layer: AttentionLayer,
    statistics: LayerStatistics,
    held: EvalWindows,
    measure: HeldOutKL,
    kinds: dict[str, KVCacheKind | None],
    first_tokens: int,
) -> dict[str, list[Choice]]:
    """Return, for each format, bytes and KL of the choices on the lower hull of block error over bytes."""
    dims = layer.dims
    keys, joint = dims.n_kv_heads * dims.qk, len(statistics.mean)
    by_error: dict[str, list[Choice]] = {name: [] for name in kinds}
    maps_of = {}
    for geo in (step for step in STEPS if step % 2 == 0 and step <= keys):
        maps_of[geo] = latent_maps(
            layer, statistics, split_keys(layer, statistics, geo), statistics.queries, joint, 1.0
        )
        for rank in (step for step in STEPS if step <= joint and is_sane(step, geo)):
            for name, kind in kinds.items():
                size = int(bytes_of_streams((("c", 1, rank), ("k_geo", 1, geo)), kind or KVCacheKind.FP16))
                if size < BYTES_PER_ELEMENT * joint:
                    output = latent_output(held, maps_of[geo].truncate(rank), first_tokens, kind)
                    widths = (("sem_dim", rank), ("geo_dim", geo))
                    by_error[name].append(Choice(size, held.relative(output) ** 2, widths))
    found: dict[str, list[Choice]] = {}
    for name, choices in by_error.items():
        found[name] = []
        for choice in lower_hull(choices):
            widths = dict(choice.widths)
            maps = maps_of[widths["geo_dim"]].truncate(widths["sem_dim"])
            kl = measure.replacing(layer, latent_output(held, maps, first_tokens, kinds[name]))
            found[name].append(Choice(choice.elements, kl, choice.widths))
    return found
