"""Statistics of a model's memory slots, and another number of slots for a built model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from caramba.config.model import ModelSpec
from caramba.config.source import is_mapping
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.layer.memory_bank import CLOSED_BIAS, MemoryBankLayer

if TYPE_CHECKING:
    from caramba.model.model import Model

DEAD_SHARE = 0.01
"""A slot is dead below this share of the read mass that it has where all slots are read alike."""
COLLAPSE = 0.5
"""Share of dead slots above which a memory has collapsed."""
STATISTICS = {
    "utilization": "Share of memory slots in use: exp(H) / slots of the read mass per slot",
    "dead_share": "Share of memory slots that are hardly read",
    "memory_mass": "Probability that goes to memory slots, not to the window",
    "write_rate": "Share of a token that a memory slot takes",
}
"""What is measured of slots, by its key, in words."""


class SlotMemory:
    """Memory slots of a model, and what was measured last."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._slot_reads: dict[str, Tensor] | None = None
        self._memory_stats: dict[str, Any] | None = None
        self._has_warned_of_collapse = False

    def measure(self, tokens: Tensor | None = None) -> dict[str, Any]:
        """Return how slots are used over a forward of `tokens` [B, T]; without tokens, what the last call returned.

        `utilization` is exp(H) / slots of the read mass per slot, `dead_share` the share of slots below 1% of an equal
        part of it, `memory_mass` the probability that goes to slots, `write_rate` the mean of 1 - a over written tokens
        and slots; each the mean over layers and heads. `layers` has the same by layer, and `read_mass` [K, slots] per
        query. More than half of the slots dead is warned of once.

        Raises:
            ConfigError: a model without memory slots, or no tokens so far.
        """
        layers = memory_layers(self.model)
        if tokens is None:
            if self._memory_stats is None:
                raise ConfigError(
                    "get_memory_stats: no tokens were measured so far; call get_memory_stats(tokens) with text of the "
                    "model, longer than its window"
                )
            return self._memory_stats
        window = max(layer.config.local_window or 0 for layer in layers.values())
        if tokens.dim() != 2 or tokens.shape[1] <= window:
            raise ConfigError(
                f"get_memory_stats: tokens have shape {tuple(tokens.shape)}, and nothing leaves a window of {window}; "
                f"give [B, T] with T above {window}"
            )
        for layer in layers.values():
            layer.start_use()
        try:
            # A compiled forward was traced without the recording, and would be compiled again for each use.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self.model(tokens)
            by_layer = {name: _use_of(layer) for name, layer in layers.items()}
        finally:
            for layer in layers.values():
                layer.use = None
        self._slot_reads = {name: use["read_mass"] for name, use in by_layer.items()}
        stats = {key: sum(use[key] for use in by_layer.values()) / len(by_layer) for key in STATISTICS}
        self._memory_stats = stats | {"layers": by_layer}
        if stats["dead_share"] > COLLAPSE and not self._has_warned_of_collapse:
            self._has_warned_of_collapse = True
            logger.warning(
                f"memory slots: {stats['dead_share']:.0%} are dead (read below {DEAD_SHARE:.0%} of an equal share); "
                "use fewer with resize_memory(), or a smaller memory_tau"
            )
        return self._memory_stats

    def resize(self, slots: int, *, optimizer: torch.optim.Optimizer | None = None, is_open: bool = False) -> None:
        """Give every memory layer `slots` slots, and the optimizer's state of their gates the same change.

        Fewer: those that were read most in the last `get_memory_stats(tokens)` stay, in their order. More: new slots
        write nothing, so that logits stay as they are; no gradient opens them. With `is_open` their gates are sampled
        as in a new model. Parameters stay the same objects; contexts and compiled forwards of before are of no use.

        Raises:
            ConfigError: no slots, or fewer slots without statistics; the model is then unchanged.
        """
        layers = memory_layers(self.model)
        if slots < 1:
            raise ConfigError(f"resize_memory: got {slots} slots, expected at least 1")
        reads = self._slot_reads or {}
        for name, layer in layers.items():
            if slots <= layer.config.memory_first_tokens:
                raise ConfigError(
                    f"resize_memory: got {slots} slots, and {name} holds the first {layer.config.memory_first_tokens} "
                    f"tokens in as many; use at least {layer.config.memory_first_tokens + 1}"
                )
            if slots < layer.config.slots and name not in reads:
                raise ConfigError(
                    f"resize_memory: {name} has {layer.config.slots} slots, and what is read of them is not known; "
                    "call get_memory_stats(tokens) first"
                )
        kept = {name: _kept_slots(layer, slots, reads.get(name, layer.slot_gate)) for name, layer in layers.items()}
        spec = _with_slots(self.model.spec, slots)
        for name, layer in layers.items():
            _resize(layer, kept[name], slots, optimizer, is_open=is_open)
        self.model.spec, self._slot_reads, self._memory_stats = spec, None, None


def memory_layers(model: Model) -> dict[str, MemoryBankLayer]:
    """Return a model's memory layers by name.

    Raises:
        ConfigError: it has none.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MemoryBankLayer)}
    if not layers:
        raise ConfigError("this model has no MemoryBankLayer, hence no memory slots; use one, such as tiny_memory")
    return layers


def _use_of(layer: MemoryBankLayer) -> dict[str, Any]:
    use = layer.use
    assert use is not None
    mass = use.reads / max(use.n_queries, 1)
    share = mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
    entropy = -(share * share.clamp_min(1e-30).log()).sum(-1)
    is_dead = share < DEAD_SHARE / layer.config.slots
    return {
        "utilization": (entropy.exp() / layer.config.slots).mean().item(),
        "dead_share": is_dead.float().mean().item(),
        "memory_mass": mass.sum(-1).mean().item(),
        "write_rate": (use.writes / max(use.n_written, 1)).mean().item(),
        "read_mass": mass,
    }


def _kept_slots(layer: MemoryBankLayer, slots: int, reads: Tensor) -> Tensor:
    """Return the slots of each head that stay, [K, n] in rising order."""
    heads, now = layer.dims.n_kv_heads, layer.config.slots
    if slots >= now:
        return torch.arange(now, device=layer.slot_gate.device).expand(heads, now)
    is_first = torch.arange(now, device=reads.device) < layer.config.memory_first_tokens
    return reads.masked_fill(is_first, torch.inf).topk(slots, dim=-1).indices.sort(-1).values


def _resize(
    layer: MemoryBankLayer,
    kept: Tensor,
    slots: int,
    optimizer: torch.optim.Optimizer | None,
    *,
    is_open: bool,
) -> None:
    old, n_new = layer.config.slots, slots - kept.shape[1]
    layer.config = layer.config.model_copy(update={"memory_slots": slots, "memory_compression_ratio": None})
    fresh = MemoryBankLayer(layer.config)
    fresh.reset_parameters()
    if not is_open:
        nn.init.zeros_(fresh.slot_gate)
        nn.init.constant_(fresh.slot_gate_bias, CLOSED_BIAS)
    heads = layer.dims.n_kv_heads
    names = ("slot_gate", "slot_gate_bias", *(("slot_bias",) if layer.config.memory_slot_bias is not None else ()))
    for name in names:
        parameter, new = getattr(layer, name), getattr(fresh, name).detach()
        before = parameter.shape
        added = new.to(parameter).unflatten(0, (heads, -1)) if new.dim() == 1 else new.to(parameter)
        added = added[:, slots - n_new :]
        parameter.data = _taken(parameter.detach(), kept, old, added)
        parameter.grad = None
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, x in state.items():
            if isinstance(x, Tensor) and x.shape == before:
                optimizer.state[parameter][key] = _taken(x, kept, old, torch.zeros_like(added, dtype=x.dtype))  # pyright: ignore[reportOptionalMemberAccess]


def _taken(x: Tensor, kept: Tensor, old: int, added: Tensor) -> Tensor:
    """Return the rows `kept` [K, n] of x, [K, M, ...] or [K * M], and the added ones after them."""
    by_slot = x.view(kept.shape[0], old, *x.shape[1:][1:])
    rows = torch.arange(kept.shape[0], device=kept.device)[:, None]
    taken = torch.cat((by_slot[rows, kept], added), dim=1)
    return (taken.flatten() if x.dim() == 1 else taken).contiguous()


def _with_slots(spec: ModelSpec, slots: int) -> ModelSpec:
    """Return a description with this many slots in every memory layer."""

    def replace_slots(node: Any) -> Any:
        if is_mapping(node):
            found = {key: replace_slots(value) for key, value in node.items()}
            if node.get("type") != "MemoryBankLayer":
                return found
            return found | {"memory_slots": slots, "memory_compression_ratio": None}
        return [replace_slots(value) for value in node] if isinstance(node, list | tuple) else node

    # A manifest's model also describes a teacher, whose slots stay as they are.
    parts = spec.model_dump(mode="json", include={"embedder", "topology", "head"})
    found = ModelSpec.model_validate(parts | {"topology": replace_slots(parts["topology"])})
    return spec.model_copy(update={"topology": found.topology})
