"""From a command line to a validated Manifest: compose or read, describe networks that folders hold, lower, check."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from caramba.config.composition import Composition
from caramba.config.crosscheck import check_vocabulary, cross_check
from caramba.config.hf import CONFIG, DERIVED, describe_hf, hf_name, is_hf_folder, read_hf_config
from caramba.config.lower import Lowered, lower_file, lower_groups
from caramba.config.manifest import GroupConfig, Manifest, parse_manifest
from caramba.config.model import FitConfig
from caramba.config.parse import parse_as
from caramba.config.plugins import use_plugins
from caramba.config.source import Path, SourceMap, format_place, is_mapping, read_path
from caramba.config.train import PhaseConfig
from caramba.data.checkpoint.folder import is_gguf
from caramba.data.checkpoint.hub import HUB_ID, cached_folder
from caramba.errors import CheckpointError, ConfigError, nearest
from caramba.launch.config_files import Origin, groups
from caramba.launch.preflight import from_hub
from caramba.runs import MANIFEST

if TYPE_CHECKING:
    from caramba.config.estimate import FitResult


@dataclass(frozen=True)
class Frozen:
    """A validated manifest with what is needed to speak of it in the user's terms.

    `is_data_chosen` is false when the data is merely that of the defaults list; `fit` tells how the model was
    scaled, when the manifest asked for it.
    """

    manifest: Manifest
    overrides: tuple[str, ...]
    source: Origin
    origins: dict[Path, Path]
    is_data_chosen: bool = True
    fit: FitResult | None = None

    def check_vocabulary(self) -> None:
        """Raise when data and model have different vocabularies."""
        check_vocabulary(self.manifest)


def freeze(overrides: Sequence[str], config_dirs: Sequence[File] = ()) -> Frozen:
    """Turn overrides into a checked manifest; `manifest=FILE` among them reads a single file instead of the groups.

    Raises:
        ConfigError: everything that is wrong, with paths, places and nearest names.
    """
    named = [word for word in overrides if word.lstrip("+").startswith("manifest=")]
    if named:
        if config_dirs:
            raise ConfigError("--config-dir adds groups, and a manifest file uses none; leave one of the two out")
        file = File(named[-1].split("=", 1)[1]).expanduser()
        rest = [word for word in overrides if word not in named]
        frozen = _from_file(file, rest, tuple(overrides))
    else:
        frozen = _from_groups(overrides, config_dirs)
    if frozen.manifest.fit is not None:
        manifest, derivation = resolve_fit(frozen.manifest, frozen.manifest.fit, frozen.overrides)
        frozen = dataclasses.replace(frozen, manifest=manifest, fit=derivation)
    cross_check(frozen.manifest)
    _check_widths(frozen)
    return frozen


def _check_widths(frozen: Frozen) -> None:
    from caramba.config.estimate import check_variants, check_widths

    try:
        check_widths(frozen.manifest.model)
    except ConfigError as error:
        path = read_path(str(error).partition(": ")[0])
        raise ConfigError(f"{error}{format_place(path, frozen.source)}") from None
    if any(run.exp is not None for group in frozen.manifest.groups_to_run() for run in group.runs):
        check_variants(frozen.manifest)


def _from_groups(overrides: Sequence[str], config_dirs: Sequence[File]) -> Frozen:
    from caramba.launch.compose import compose

    composed = compose(overrides, config_dirs)
    tree = _with_plugins(derive_models(composed.tree, composed.source), composed.source)
    if composed.choices.get("train") in SCALED:
        tree = scale_train(tree, composed.given)
    parse_as(Composition, tree, source=composed.source)
    _refuse_foreign_group(tree, composed.choices)
    lowered = lower_groups(tree, composed.choices, composed.given, composed.chosen)
    frozen = _finish(lowered, tree, composed.source, composed.overrides)
    is_data_chosen = "data" in composed.chosen or any(path[0] == "data" for path in composed.given)
    return dataclasses.replace(frozen, is_data_chosen=is_data_chosen)


def _from_file(file: File, overrides: Sequence[str], typed: tuple[str, ...]) -> Frozen:
    from caramba.launch.manifest_file import read_file

    tree, source, given = read_file(file, overrides)
    tree = _with_plugins(derive_models(tree, source), source)
    lowered = lower_file(tree, file.stem, given)
    return _finish(lowered, tree, source, typed)


def _with_plugins(tree: dict[str, Any], source: Origin) -> dict[str, Any]:
    """Import the plugins of a tree and note the folders that they are in; the types of its nodes are known then."""
    found = use_plugins(tree, source=source, is_typed=True)
    return {**tree, "plugins": found} if found else tree


def _finish(lowered: Lowered, tree: dict[str, Any], source: Origin, overrides: tuple[str, ...]) -> Frozen:
    manifest = parse_manifest(lowered.manifest, source=source, origins=lowered.origins, typed=tree)
    return Frozen(manifest, overrides, source, lowered.origins)


def _refuse_foreign_group(tree: dict[str, Any], choices: dict[str, str]) -> None:
    """`group=` selects a group of a manifest; composed groups make one, named after the benchmark option."""
    group, suite = tree.get("group"), choices.get("benchmark", "none")
    if group is None or group == ("main" if suite == "none" else suite):
        return
    known = groups().get("benchmark", {})
    way = (
        f"write benchmark={group}"
        if group in known
        else f"options of benchmark: {', '.join(known)}{nearest(group, known)}"
    )
    raise ConfigError(f"group={group} selects a group of a single-file manifest; for composed groups {way}")


def resolve_fit(manifest: Manifest, fit_config: FitConfig, overrides: Sequence[str]) -> tuple[Manifest, FitResult]:
    """Return the manifest with its model fitted and the section gone, and the derivation.

    The derivation is added to the manifest's notes. Training phases take `fit.block_size` unless a block size was
    typed for them.

    Raises:
        ConfigError: a target that cannot be reached, or a model whose weights fix its shape.
    """
    from caramba.config.estimate import FitRow, fit

    result = fit(manifest.model, fit_config.target_params, fit_config.block_size)
    groups = manifest.groups
    block_size = fit_config.block_size
    if block_size is not None and not _is_typed(overrides):
        before = sorted({run.train.block_size for group in groups for run in group.runs if run.train})
        groups = tuple(_with_block_size(group, block_size) for group in groups)
        if before and before != [block_size]:
            row = FitRow(
                "train.block_size",
                ", ".join(map(str, before)),
                str(block_size),
                "fit.block_size, since none was typed",
            )
            result = dataclasses.replace(result, rows=(*result.rows[:-1], row, result.rows[-1]))
    notes = f"{manifest.notes}\n{result.note}" if manifest.notes else result.note
    changed = {"model": result.model, "fit": None, "groups": groups, "notes": notes}
    return manifest.model_copy(update=changed), result


def _is_typed(overrides: Sequence[str]) -> bool:
    """Whether the command line sets the block size of a phase, under any of its names."""
    names = {alias for alias, name in PhaseConfig.aliases.items() if name == "block_size"} | {"block_size"}
    keys = [word.lstrip("+").partition("=")[0].split(".") for word in overrides]
    return any("train" in key[:-1] and key[-1] in names for key in keys)


def _with_block_size(group: GroupConfig, block_size: int) -> GroupConfig:
    runs = tuple(
        run
        if run.train is None
        else run.model_copy(update={"train": run.train.model_copy(update={"block_size": block_size})})
        for run in group.runs
    )
    return group.model_copy(update={"runs": runs})


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
    path = File(text).expanduser()
    if not is_gguf(path):
        return text
    from caramba.data.checkpoint.gguf_file import unpack_gguf  # loads numpy

    return str(unpack_gguf(path))


def _student(model: dict[str, Any], teacher: dict[str, Any], name: str, source: SourceMap | None) -> dict[str, Any]:
    """Return `model` with the network of its teacher, its attention decoupled, or with memory, by `model.surgery`."""
    for key in DERIVED:
        if key in model:
            raise ConfigError(
                f"model.{key}: follows from the teacher, as model.topology does, and cannot be set without it"
                f"{format_place(('model', key), source)}; remove it, or write the whole network"
            )
    surgery = dict(model["surgery"])
    if surgery.get("method") == "memory":
        own = {"type": "MemoryBankLayer"} | {key: surgery.get(key) for key in ("local_window", "memory_slots")}
        own["memory_first_tokens"] = surgery.get("memory_first_tokens") or 0
        own["memory_slot_bias"] = surgery.get("memory_slot_bias")
        topology = _with_attention(teacher["topology"], lambda node: node | own)
        return {**model, **teacher, "topology": topology, "name": model.get("name") or f"{name}_memory"}
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
        "topology": _with_attention(teacher["topology"], lambda node: _without_norms(node) | own),
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


def _with_attention(node: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the tree with each attention layer as `change` returns it."""
    if node["type"] == "AttentionLayer":
        return change(node)
    if "layers" not in node:
        return node
    return {**node, "layers": [_with_attention(child, change) for child in node["layers"]]}


def _without_norms(attention: dict[str, Any]) -> dict[str, Any]:
    """Return an attention layer without norms of queries and keys, which no surgery to decoupled attention maps."""
    return {key: value for key, value in attention.items() if not key.startswith("qk_norm")}


def _described(folder: File) -> dict[str, Any]:
    return describe_hf(read_hf_config(folder), str(folder / CONFIG))


def _path_folder(text: str, key: str) -> File:
    """Return the Hugging Face folder that `key` names; of a hub id its config.json is fetched where it is missing."""
    path = File(text).expanduser()
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


def _teacher_folder(text: str) -> File | None:
    path = File(text).expanduser()
    if path.is_dir() and is_hf_folder(path) and not (path / MANIFEST).is_file():
        return path
    return cached_folder(text) if _is_hub_id(text) else None


def _is_hub_id(text: str) -> bool:
    """Whether `text` can only be a hub id: nothing here has that path, and it is not where runs would be."""
    is_here = File(text).expanduser().exists() or text.startswith("runs/")
    return not is_here and HUB_ID.match(text) is not None


SCALED = ("blockwise", "upcycle")
"""Options of `train` whose numbers are for proxies of a minute."""
MOST_TOKENS = 500 * 65_536
"""Tokens of all phases together, of text that has as many: those of train=distill_135m."""
STEP_TOKENS, LONGEST_WINDOW, LEAST_STEPS = 65_536, 2048, 200
WIDE_MODEL = 1024
_SIZES = ("steps", "batch_size", "block_size", "gradient_accumulation_steps")
_OTHER_NAMES = {"seq_len", "ctx_len", "accumulate"}


def scale_train(tree: dict[str, Any], given: Collection[tuple[Any, ...]]) -> dict[str, Any]:
    """Return `tree` with sizes that follow from a Hugging Face teacher and a token folder.

    One pass over the text, at most `MOST_TOKENS`, is divided among the phases as the option divides its own tokens.
    Steps have up to `STEP_TOKENS` tokens in windows of up to `LONGEST_WINDOW` or the teacher's context, and warm-up is
    6% of them. Rates stay `auto`. A size that is given anywhere leaves all as they are.
    """
    text, teacher = _text_tokens(tree), _teacher(tree)
    if text is None or teacher is None or _is_sized(given):
        return tree
    train, held_out = text
    context, width = teacher
    phases = {name: dict(phase) for name, phase in tree["train"]["phases"].items()}
    own = {
        name: phase["steps"] * phase["batch_size"] * phase["block_size"]
        for name, phase in phases.items()
        if name != "pretrain" and "steps" in phase
    }
    total = max(sum(own.values()), min(train, MOST_TOKENS))
    step = min(STEP_TOKENS, total // LEAST_STEPS)
    longest = min(LONGEST_WINDOW, context, step // 4, held_out - 1)
    window = 1 << max(longest.bit_length() - 1, 0)
    rows = max(1, step // window)
    most = 32 if width <= WIDE_MODEL else 8
    accumulation = -(-rows // most)
    batch = -(-rows // accumulation)
    for name, phase in phases.items():
        if name == "pretrain":
            continue
        phase |= {"batch_size": batch, "block_size": window, "gradient_accumulation_steps": accumulation}
        if name in own:
            share = own[name] / sum(own.values())
            phase["steps"] = max(1, round(total * share / (batch * window * accumulation)))
            phase["warmup_steps"] = max(1, round(0.06 * phase["steps"]))
    return {**tree, "train": {**tree["train"], "phases": phases}}


def _is_sized(given: Collection[tuple[Any, ...]]) -> bool:
    names = {*_SIZES, *_OTHER_NAMES}
    return any(path[0] == "train" and path[-1] in names for path in given if path)


def _teacher(tree: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return context and width of a teacher that is a Hugging Face folder, else None."""
    model = tree.get("model")
    teacher = model.get("teacher") if is_mapping(model) else None
    place = teacher.get("checkpoint") if is_mapping(teacher) else None
    if not isinstance(place, str) or not is_hf_folder(folder := File(place).expanduser()):
        return None
    config = read_hf_config(folder)
    context, width = config.get("max_position_embeddings"), config.get("hidden_size")
    return (context, width) if isinstance(context, int) and isinstance(width, int) else None


def _text_tokens(tree: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of train and val of a token folder, else None; the data's own checks name what is wrong."""
    data = tree.get("data")
    place = data.get("path") if is_mapping(data) and data.get("type") == "tokens" else None
    if not isinstance(place, str) or not os.path.isfile(File(place).expanduser() / "meta.json"):
        return None
    try:
        splits = json.loads((File(place).expanduser() / "meta.json").read_text(encoding="utf-8"))["splits"]
        train = int(splits["train"]["tokens"])
        # Without a split of its own the data holds out the end of train.
        return train, int(splits["val"]["tokens"]) if "val" in splits else max(train // 20, 2)
    except (OSError, ValueError, KeyError, TypeError):
        return None
