"""Files of what a context holds: a conversation's state continues in another process, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caramba.cache import Context, MemoryLayerKVCache
from caramba.config.kvcache import KVCacheKind
from caramba.data.checkpoint.header import read_metadata
from caramba.data.checkpoint.tensors import load_tensors, save_tensors
from caramba.errors import ConfigError
from caramba.model import Model, model_hash

FORMAT = "caramba state 1"


def save_state(
    path: Path,
    model: Model,
    ctx: Context,
    tokens: Sequence[int] = (),
    conversation: Mapping[str, Any] | None = None,
) -> None:
    """Write what a context holds, and optionally the tokens that it has seen, to a safetensors file.

    `conversation`, of JSON values, is kept with them for `read_conversation`.

    Raises:
        ConfigError: tokens of another number than the context's position.
        OSError: the file cannot be written; an old one is as it was.
    """
    if tokens and len(tokens) != ctx.position:
        raise ConfigError(
            f"{path}: got {len(tokens)} tokens for a context that has seen {ctx.position}; give those that it has seen"
        )
    described = _described(model, ctx) | {"model": model_hash(model), "tokens": json.dumps(list(tokens))}
    if conversation is not None:
        described["conversation"] = json.dumps(conversation)
    save_tensors(Path(path), ctx.state_dict(), described)


def load_state(path: Path, model: Model, ctx: Context) -> list[int]:
    """Load a file of `save_state` into a context of the same model; return the tokens that were saved with it.

    The context's next forward gives what that of the saved one would have given.

    Raises:
        CheckpointError: no readable safetensors file.
        ConfigError: a state of another model, format, number of slots or batch; the context is then empty or as it was.
    """
    found = _metadata(path)
    for key, value in _described(model, ctx).items():
        if found.get(key) != value:
            raise ConfigError(
                f"{path}: the state has {key} {found.get(key)}, the context here {value}; make the context as the one "
                "that was saved"
            )
    if found.get("model") != model_hash(model):
        raise ConfigError(
            f"{path}: the state of another model (other weights or description); load the model that it was saved with"
        )
    ctx.load_state_dict(load_tensors(Path(path)))
    return [int(token) for token in json.loads(found.get("tokens", "[]"))]


def read_conversation(path: Path) -> dict[str, Any]:
    """Return the conversation that was saved with a state.

    Raises:
        CheckpointError: no readable safetensors file.
        ConfigError: a file without a conversation.
    """
    found = _metadata(path).get("conversation")
    if found is None:
        raise ConfigError(
            f"{path}: a state without a conversation; give a file that /save of caramba chat wrote"
        )
    return json.loads(found)


def _metadata(path: Path) -> dict[str, str]:
    found = read_metadata(Path(path))
    if found.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a file of a context's state; give one that save_state() wrote")
    return found


def _described(model: Model, ctx: Context) -> dict[str, str]:
    """Return what must agree before tensors are compared, by its name in messages."""
    kinds = sorted({cache.kind for cache in ctx.caches}, key=KVCacheKind.__str__)
    slots = [cache.state.mass.shape[2] for cache in ctx.caches if isinstance(cache, MemoryLayerKVCache)]
    return {
        "format": FORMAT,
        "dtype": str(model.embedder.token.weight.dtype).removeprefix("torch."),
        "cache": ", ".join(kind.value for kind in kinds),
        "slots": ", ".join(map(str, slots)) or "none",
        "batch": str(ctx.caches[0].batch_size if ctx.caches else 0),
    }
