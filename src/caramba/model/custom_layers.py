"""Custom layers of a model: their caches, and checks of their decoding, causality and tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from caramba.cache import CustomLayerCache, LayerCache, new_layer_cache
from caramba.config.extension import user_traceback
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.errors import ConfigError
from caramba.layer.attention import AttentionLayer
from caramba.model.topology.base import applications, custom_layers_of, own_config

if TYPE_CHECKING:
    from caramba.model.model import Model

TOKENS = 48
"""Length of the sequences that are compared."""
CHUNKS = (5, 1, 1, 9, 32)
EXACT, NARROW = 1e-2, 5e-2
"""Relative differences of a layer's output that rounding explains, in float32 (with TF32 products) and in 16 bits."""
_KINDS = {torch.bfloat16: KVCacheKind.BF16, torch.float16: KVCacheKind.FP16}


def cached_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layer of every application that keeps a cache, in execution order.

    Raises:
        ConfigError: a custom layer that does not declare how it is decoded.
    """
    found: list[nn.Module] = []
    for name, layer in applications(module):
        config = own_config(layer)
        if config is not None and config.decoding == "refused":
            raise ConfigError(
                f"{name}: a {config.type} does not say how it is decoded token by token, so this model is not; set "
                f'decoding = "per_token" in {type(config).__name__} if it looks at no other token, or "cached" and '
                "keep what it needs of earlier ones (docs/layers.md)"
            )
        if config is None or config.decoding == "cached":
            found.append(layer)
    return found


def new_cache(
    layer: nn.Module,
    batch_size: int,
    max_tokens: int,
    kind: KVCacheKind,
    device: torch.device,
    static: bool,
    *,
    windowed: bool = False,
    **format: Any,
) -> LayerCache:
    """Return an empty cache of an application; the arguments are those of `new_layer_cache` behind the first.

    `windowed` keeps the last tokens alone where the layer has a window that is shorter than `max_tokens`, the format
    is exact, and keys are not latents, whose kernels read the whole cache.
    """
    args = (batch_size, max_tokens, kind, device, static)
    config = own_config(layer)
    if config is not None:
        return CustomLayerCache.of(config.cached_streams(), *args, **format)
    make: Callable[..., LayerCache] | None = getattr(layer, "new_cache", None)
    if make is not None:  # a layer that stores more than keys and values
        return make(*args, **format)
    assert isinstance(layer, AttentionLayer)
    window = layer.score.window
    if windowed and window is not None and kind in EXACT_KINDS and not layer.config.is_latent:
        from caramba.cache.window import WindowLayerKVCache  # which few models need

        if window + WindowLayerKVCache.spare < max_tokens:
            return WindowLayerKVCache(layer.dims.streams, window, batch_size=batch_size, kind=kind, device=device)
    return new_layer_cache(layer.dims, *args, **format)


def refuse_lost_tensors(model: nn.Module) -> None:
    """Refuse numbers that a rank could not be given: its part of a model is made without memory, and is filled from a
    state dict.

    Raises:
        ConfigError: a custom layer with a buffer that no state dict holds, or a tensor that is no buffer.
    """
    for name, layer in custom_layers_of(model):
        for key, what in _lost_tensors(layer):
            raise ConfigError(
                f"parallel: {name} has the {what} {key}, which ranks with a part of the weights are not given; make it "
                "a buffer with persistent=True (register_buffer), or use parallel=ddp"
            )


def _lost_tensors(layer: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, what it is) of each tensor of a layer that its state dict leaves out."""
    kept = layer.state_dict()
    for name, _ in layer.named_buffers():
        if name not in kept:
            yield name, "persistent=False buffer"
    for inner, module in layer.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{inner}.{key}".lstrip("."), "plain tensor"


def refuse_documents(model: nn.Module) -> None:
    """Refuse separate documents in a row for layers that may look at other tokens, and so across documents.

    Raises:
        ConfigError: naming the layer.
    """
    for name, layer in custom_layers_of(model):
        config = own_config(layer)
        if config is not None and config.decoding != "per_token":
            raise ConfigError(
                f"{name}: a {config.type} may look at other tokens, and documents of a row are separate "
                '(data.packing, data.document_mask); leave them joined, or set decoding = "per_token" if it looks at '
                "none"
            )


def check_causal(model: Model) -> None:
    """Check that no output of a custom layer depends on a later token.

    A forward is compared with one whose last token differs. With weights that let nothing through, such as a gate at
    zero, there is nothing to be seen, so it is done before a phase and after it.

    Raises:
        ConfigError: a layer whose earlier outputs change with the last token, whose output has another shape, or
            whose forward fails.
    """
    if not custom_layers_of(model):
        return
    tokens = _tokens(model)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % model.spec.embedder.vocab_size
    with _quiet(model):
        first, second = (_outputs(model, [part]) for part in (tokens, other))
    for (name, kind, one), (_, _, two) in zip(first, second, strict=True):
        if one.shape[1] > 1 and _differ(one[:, :-1], two[:, :-1], EXACT):
            raise ConfigError(
                f"{name}: a {kind} looks at later tokens: its output changes with a token that comes after it, so a "
                "model with it would read what it is to predict; make it causal"
            )


def check_decoding(model: Model) -> None:
    """Check that cached decoding in chunks matches one full forward.

    Raises:
        ConfigError: a layer whose outputs differ.
    """
    tokens = _tokens(model)
    dtype = model.embedder.token.weight.dtype
    chunks = list(tokens.split(_lengths(tokens.shape[1]), dim=1))
    with _quiet(model):
        whole = _outputs(model, [tokens])
        ctx = model.new_context(1, tokens.shape[1], _KINDS.get(dtype, KVCacheKind.FP32))
        parts = _outputs(model, chunks, ctx)
    limit = EXACT if dtype in (torch.float32, torch.float64) else NARROW
    for index, (name, kind, full) in enumerate(whole):
        stepped = torch.cat([out for _, _, out in parts[index :: len(whole)]], dim=1)
        if _differ(full, stepped, limit):
            raise ConfigError(
                f"{name}: a {kind} gives other outputs token by token than in one forward over all of them, so what "
                "this model writes would not be what it was trained for; correct its forward with ctx, or its "
                '`decoding` ("per_token" looks at no other token)'
            )


def _lengths(n_tokens: int) -> list[int]:
    lengths: list[int] = []
    for length in CHUNKS:
        left = n_tokens - sum(lengths)
        if left > 0:
            lengths.append(min(length, left))
    return lengths


def _tokens(model: Model) -> Tensor:
    embedder = model.spec.embedder
    n_tokens = min(TOKENS, embedder.max_positions or TOKENS)
    device = model.embedder.token.weight.device
    return (torch.arange(1, n_tokens + 1, device=device)[None] * 7919) % embedder.vocab_size


@contextlib.contextmanager
def _quiet(model: Model) -> Iterator[None]:
    """Within, the model is in eval mode, and no gradients or autocast are on."""
    was_training, device = model.training, model.embedder.token.weight.device
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        model.train(was_training)


def _outputs(model: Model, parts: list[Tensor], ctx: Any = None) -> list[tuple[str, str, Tensor]]:
    """Run parts of a sequence and return (name, type, output) of each own layer's applications, in order."""
    found: list[tuple[str, str, Tensor]] = []

    def watch(name: str, kind: str) -> Any:
        def keep(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            x = given[0]
            if not isinstance(out, Tensor) or out.shape[:2] != x.shape[:2]:
                got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ConfigError(
                    f"{name}: a {kind} returned {got} for {tuple(x.shape)}; return a tensor [B, T, width], as many "
                    "tokens as came in"
                )
            found.append((name, kind, out.detach().float()))

        return keep

    hooks = []
    for name, layer in custom_layers_of(model):
        config = own_config(layer)
        assert config is not None
        hooks.append(layer.register_forward_hook(watch(name, config.type)))
    try:
        for part in parts:
            model.hidden(part, ctx)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"a forward of {parts[0].shape[1]} tokens through a layer of your own failed: {user_traceback(error)}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _differ(one: Tensor, two: Tensor, limit: float) -> bool:
    if one.shape != two.shape:
        return True
    return bool((one - two).norm() > limit * one.norm() + 1e-6)
