"""Files of what a context holds: a conversation's state continues in another process, bit for bit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from caramba.cache import Context, MemoryLayerKVCache
from caramba.config.kvcache import KVCacheKind
from caramba.data.checkpoint.header import read_metadata
from caramba.data.checkpoint.tensors import load_tensors, save_tensors
from caramba.errors import CheckpointError, ConfigError
from caramba.model import Model, model_hash

FORMAT = "caramba state 1"
Value = TypeVar("Value")


def save_state(path: Path, model: Model, ctx: Context, tokens: Sequence[int] = (), conversation: object = None) -> None:
    """Write what a context holds, and optionally the tokens that it has seen, to a safetensors file.

    `conversation`, a dataclass, is kept with them for `read_conversation`.

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
        described["conversation"] = TypeAdapter(type(conversation)).dump_json(conversation).decode()
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
    tokens = _tokens(path, found)
    ctx.load_state_dict(load_tensors(Path(path)))
    return tokens


def read_conversation(path: Path, kind: type[Value]) -> tuple[Value, int]:
    """Return the conversation, a dataclass, that was saved with a state, and the number of the state's tokens.

    Raises:
        CheckpointError: no readable safetensors file, or a conversation of another form.
        ConfigError: a file without a conversation.
    """
    metadata = _metadata(path)
    found = metadata.get("conversation")
    if found is None:
        raise ConfigError(f"{path}: a state without a conversation; give a file that /save of caramba chat wrote")
    return _parsed(path, kind, "conversation", found), len(_tokens(path, metadata))


def _tokens(path: Path, metadata: Mapping[str, str]) -> list[int]:
    return _parsed(path, list[int], "tokens", metadata.get("tokens", "[]"))


def _parsed(path: Path, kind: type[Value], name: str, text: str) -> Value:
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (name, *first["loc"])))
        raise CheckpointError(f"{path}: {where} cannot be read ({first['msg'][:100]}); save it again") from None


def _metadata(path: Path) -> dict[str, str]:
    found = read_metadata(Path(path))
    if found.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a file of a context's state; give one that save_state() wrote")
    return found


def _described(model: Model, ctx: Context) -> dict[str, str]:
    kinds = sorted({cache.kind for cache in ctx.caches}, key=KVCacheKind.__str__)
    slots = [cache.state.mass.shape[2] for cache in ctx.caches if isinstance(cache, MemoryLayerKVCache)]
    return {
        "format": FORMAT,
        "dtype": str(model.embedder.token.weight.dtype).removeprefix("torch."),
        "cache": ", ".join(kind.value for kind in kinds),
        "slots": ", ".join(map(str, slots)) or "none",
        "batch": str(ctx.caches[0].batch_size if ctx.caches else 0),
    }
