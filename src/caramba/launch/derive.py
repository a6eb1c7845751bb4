"""Networks that a Hugging Face folder describes, put into the composed tree before it is validated.

A student without a topology has its teacher's, with decoupled attention of the widths that `model.surgery` states.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caramba.config.hf import CONFIG, DERIVED, describe_hf, hf_name, is_hf_folder, read_hf_config
from caramba.config.source import SourceMap, format_place, is_mapping
from caramba.data.checkpoint.gguf_file import is_gguf, unpack_gguf
from caramba.data.checkpoint.hub import HUB_ID, cached_folder
from caramba.errors import CheckpointError, ConfigError
from caramba.launch.preflight import from_hub
from caramba.runs import MANIFEST

SINK_TOKENS = 4
"""First tokens that a latent student keeps exact: pretrained models use them as attention sinks (arXiv:2309.17453)."""
_OF_RUNS = {
    "model.path": "continue from it with the model that it trained and model.checkpoint={}",
    "model.teacher.checkpoint": "model=hf_dba reads a Hugging Face folder, so take the student's own preset, or export "
    "the run with `caramba export {} --format hf`",
}


def derive_models(tree: dict[str, Any], source: SourceMap | None) -> dict[str, Any]:
    """Return `tree` with embedder, topology and head of `model.path`, and the manifest of a teacher's folder.

    A teacher is described here when its folder or snapshot is on this machine; a hub id that is not waits for the
    launch, so that a plan uses no network. `model.path` needs its config.json at once, and a hub id fetches that alone;
    so does a teacher whose student has no topology of its own.

    Raises:
        ConfigError: a key that follows from `model.path` or from the teacher is set too.
        CheckpointError: the folder is missing, damaged or of an architecture that is not read.
    """
    model = tree.get("model")
    if not is_mapping(model):
        return tree
    model = _unpack_files(model)
    if isinstance(model.get("path"), str):
        for key in DERIVED:
            if key in model:
                raise ConfigError(
                    f"model.{key}: follows from {CONFIG} of model.path={model['path']} and cannot be set with it"
                    f"{format_place(('model', key), source)}; remove it (model=hf describes the whole network)"
                )
        folder = _path_folder(model["path"], "model.path")
        model |= _described(folder)
        model["name"] = model.get("name") or hf_name(folder)
    teacher = model.get("teacher")
    if is_mapping(teacher) and isinstance(teacher.get("checkpoint"), str) and teacher.get("manifest") is None:
        follows = is_mapping(model.get("surgery")) and "topology" not in model
        text = teacher["checkpoint"]
        found = _path_folder(text, "model.teacher.checkpoint") if follows else _teacher_folder(text)
        if found is not None:
            described = _described(found)
            model["teacher"] = {**teacher, "manifest": {"name": hf_name(found), **described}}
            if follows:
                model = _student(model, described, hf_name(found), source)
    return {**tree, "model": model}


def _unpack_files(model: dict[str, Any]) -> dict[str, Any]:
    """Return `model` with the folder that each GGUF file was unpacked to in place of the file."""
    model, teacher = dict(model), model.get("teacher")
    if isinstance(model.get("path"), str):
        model["path"] = _unpack(model["path"])
    if is_mapping(teacher) and isinstance(teacher.get("checkpoint"), str):
        model["teacher"] = {**teacher, "checkpoint": _unpack(teacher["checkpoint"])}
    return model


def _unpack(text: str) -> str:
    path = Path(text).expanduser()
    return str(unpack_gguf(path)) if is_gguf(path) else text


def _student(
    model: dict[str, Any], teacher: dict[str, Any], name: str, source: SourceMap | None
) -> dict[str, Any]:
    """Return `model` with the network of its teacher, its attention decoupled by `model.surgery`."""
    for key in DERIVED:
        if key in model:
            raise ConfigError(
                f"model.{key}: follows from the teacher, as model.topology does, and cannot be set without it"
                f"{format_place(('model', key), source)}; remove it, or write the whole network"
            )
    surgery = dict(model["surgery"])
    layers = [node for node in _nodes(teacher["topology"]) if node.get("type") == "AttentionLayer"]
    attention = layers[0]
    surgery["layout"] = "latent" if surgery.get("layout") is None else surgery["layout"]
    if surgery.get("exact_first_tokens") is None:  # '' is the user's, and refused
        has_window = any(layer.get("local_window") for layer in layers)
        keeps_none = has_window or surgery["layout"] != "latent" or surgery.get("target") == "mla"
        surgery["exact_first_tokens"] = 0 if keeps_none else SINK_TOKENS
    if surgery["layout"] == "latent":  # 5.33 times fewer elements, two thirds of them in the latent
        elements = 2 * attention["n_kv_heads"] * attention["head_dim"]
        widths = {"sem_dim": max(1, elements // 8), "geo_dim": max(2, elements // 16 // 2 * 2)}
        surgery |= {key: width for key, width in widths.items() if surgery.get(key) is None}
    missing = [key for key in ("sem_dim", "geo_dim") if surgery.get(key) is None]
    if missing and surgery["layout"] == "per_head":
        raise ConfigError(
            f"model.surgery.{', '.join(missing)}: layout=per_head has no default widths"
            f"{format_place(('model', 'surgery', 'layout'), source)}; set them, to multiples of the "
            f"{attention['n_kv_heads']} key/value heads, or use layout=latent"
        )
    keys = ("layout", "sem_dim", "geo_dim", "v_dim", "exact_first_tokens", "cache_format")
    own = {"mode": "decoupled"} | {key: surgery.get(key) for key in keys}
    if surgery.get("target") == "mla":
        own |= {"mla": True, "rope_scaling": None, "rope_base": _grid_base(attention, surgery["geo_dim"])}
    return {
        **model,
        **teacher,
        "topology": _decoupled(teacher["topology"], own),
        "surgery": surgery,
        "name": model.get("name") or f"{name}_dba",
    }


def _grid_base(attention: dict[str, Any], geo_dim: Any) -> float:
    """Return the rotary base of a standard grid of `geo_dim` that takes every nth of the teacher's frequencies.

    n is the largest that stays within them, so the grid spans the teacher's wavelengths, and no key turns at another
    speed than in the teacher.
    """
    base, width = float(attention["rope_base"]), int(attention["head_dim"])
    if not isinstance(geo_dim, int) or geo_dim < 2:  # the schema refuses it
        return base
    step = max(1, (width // 2 - 1) // max(1, geo_dim // 2 - 1))
    return base ** (min(step, width // 2) * geo_dim / width)


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("layers", ()):
        yield from _nodes(child)


def _decoupled(node: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with `own` in each attention layer, without a norm of queries and keys: no surgery maps one."""
    if node["type"] == "AttentionLayer":
        return {key: value for key, value in node.items() if not key.startswith("qk_norm")} | own
    if "layers" not in node:
        return node
    return {**node, "layers": [_decoupled(child, own) for child in node["layers"]]}


def _described(folder: Path) -> dict[str, Any]:
    return describe_hf(read_hf_config(folder), str(folder / CONFIG))


def _path_folder(text: str, key: str) -> Path:
    """Return the Hugging Face folder that `key` names; of a hub id its config.json is fetched where it is missing."""
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / MANIFEST).is_file() and not is_hf_folder(path):
            raise CheckpointError(f"{key}={text}: this is a run; {_OF_RUNS[key].format(text)}")
        return path
    if not _is_hub_id(text):
        found = "this is a file, and a folder is needed" if path.exists() else "no such folder"
        raise CheckpointError(
            f"{key}={text}: {found}; give a Hugging Face folder, or a hub id such as HuggingFaceTB/SmolLM-135M"
        )
    return from_hub(text, key, needs_weights=False)


def _teacher_folder(text: str) -> Path | None:
    path = Path(text).expanduser()
    if path.is_dir() and is_hf_folder(path) and not (path / MANIFEST).is_file():
        return path
    return cached_folder(text) if _is_hub_id(text) else None


def _is_hub_id(text: str) -> bool:
    """Whether `text` can only be a hub id: nothing here has that path, and it is not where runs would be."""
    is_here = Path(text).expanduser().exists() or text.startswith("runs/")
    return not is_here and HUB_ID.match(text) is not None
