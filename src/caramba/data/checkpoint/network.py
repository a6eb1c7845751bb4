"""Which network weights are of, and whether it is the one that a manifest describes. No torch."""

from pathlib import Path
from typing import Any

from caramba.config.hf import is_hf_folder, is_remote, read_hf_config, spec_of_folder
from caramba.config.layer import AttentionLayerConfig
from caramba.config.model import ModelSpec
from caramba.config.parse import parse_as
from caramba.config.source import parse_object
from caramba.data.checkpoint.header import read_metadata
from caramba.data.checkpoint.hf_names import llama_blocks
from caramba.errors import CheckpointError, ConfigError

SPEC_KEYS = ("type", "name", "embedder", "topology", "head")


def spec_of(model: ModelSpec) -> ModelSpec:
    """Return only what describes the network, without teacher, surgery or checkpoint."""
    return ModelSpec.model_validate(
        {key: value for key, value in model.model_dump(mode="json").items() if key in SPEC_KEYS}
    )


def read_spec(text: str, path: Path, where: str) -> ModelSpec:
    """Read the network that a file of weights describes, with the types of the plugins in use.

    Raises:
        CheckpointError: this version, or these plugins, do not know it.
    """
    plain = parse_object(text, f"{where}: {path}: spec", CheckpointError, "restore the file")
    try:
        return parse_as(ModelSpec, plain)
    except ConfigError as error:
        raise CheckpointError(
            f"{where}: {path} describes a network that is not known here: {error}. If it has layers of your own, open "
            "the run that trained it, or name their module in plugins of a manifest that reads this file"
        ) from None


def check_network(spec: ModelSpec, expected: ModelSpec | None, path: Path, where: str) -> None:
    """Check that weights are of the network that a manifest describes, if it describes one.

    Args:
        spec: of the weights at `path`; of a Hugging Face folder of a known architecture it may spell out defaults.

    Raises:
        CheckpointError: it is another network; the message names the first difference where the two are Llama-shaped.
    """
    if expected is None or _shape(spec) == _shape(expected):
        return
    reason = ""
    if path.is_dir() and is_hf_folder(path) and not is_remote(read_hf_config(path)):
        reason = difference(spec, expected)
        if not reason:
            return
    raise CheckpointError(
        f"{where}: {path} holds another network than the manifest describes{': ' if reason else ''}{reason}; remove "
        "the manifest's description of it, or name the checkpoint that belongs to it"
    )


def check_stored_network(place: Path, expected: ModelSpec, where: str) -> None:
    """Check the network that a file or folder of weights describes, without reading a tensor.

    A file without a description is left to its loader.

    Raises:
        CheckpointError: it is another network than `expected`, or the file is damaged.
    """
    if place.is_dir():
        check_network(spec_of_folder(place), expected, place, where)
    elif place.suffix == ".safetensors" and "spec" in (metadata := read_metadata(place)):
        check_network(read_spec(metadata["spec"], place, where), expected, place, where)


def _shape(spec: ModelSpec) -> dict[str, object]:
    return {key: value for key, value in spec_of(spec).model_dump(mode="json").items() if key != "name"}


def difference(found: ModelSpec, expected: ModelSpec) -> str:
    """Return the first difference between two Llama-shaped networks in words, or nothing when they are one.

    Defaults count as what they stand for: `head_dim` left out equals d_model / n_heads.
    """
    if found.embedder != expected.embedder or found.head != expected.head:
        return f"embedder and head {_text(found)}, expected {_text(expected)}"
    ours, (_, our_norm) = llama_blocks(found)
    try:
        theirs, (_, their_norm) = llama_blocks(expected)
    except CheckpointError as error:
        return str(error)
    if len(ours) != len(theirs):
        return f"{len(ours)} blocks, expected {len(theirs)}"
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        here, there = _attention(one.attention[1]), _attention(other.attention[1])
        for key, value in here.items():
            if value != there[key]:
                return f"block {index} has {key}={value}, expected {there[key]}"
        for name in ("attention_norm", "feed_forward_norm", "feed_forward"):
            if getattr(one, name)[1] != getattr(other, name)[1]:
                return f"block {index} has {getattr(one, name)[1]!r}, expected {getattr(other, name)[1]!r}"
    return "" if our_norm == their_norm else f"final norm {our_norm!r}, expected {their_norm!r}"


def _attention(config: AttentionLayerConfig) -> dict[str, Any]:
    same = ("d_model", "rope_enabled", "rope_base", "rope_scaling", "local_window", "bias", "qk_norm")
    dims = config.dims()
    values = {"n_heads": dims.n_heads, "n_kv_heads": dims.n_kv_heads, "head_dim": dims.qk}
    values |= {name: getattr(config, name) for name in same}
    return values | {"qk_norm_eps": config.qk_norm_eps if config.qk_norm else None}


def _text(spec: ModelSpec) -> str:
    return f"({spec.embedder.vocab_size} x {spec.embedder.d_model}, tied={spec.head.tied})"
