"""Opens what a user calls RUN: its model, and the tokenizer of the data that it was trained on."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from caramba import kernels
from caramba.config.hf import is_hf_folder, read_hf_config
from caramba.config.manifest import GroupConfig, Manifest
from caramba.console import logger
from caramba.data import Tokenizer, load_tokenizer, open_corpus
from caramba.data.checkpoint import index_tensors, read_metadata
from caramba.data.checkpoint.folder import is_dcp, is_gguf, latest_sharded_state
from caramba.data.checkpoint.formats import read_model_metadata
from caramba.data.checkpoint.gguf_file import unpack_gguf
from caramba.data.checkpoint.locate import EXPORTED, find_checkpoint
from caramba.data.checkpoint.shards import StoredWeights
from caramba.errors import CheckpointError, ConfigError, DataError
from caramba.lower.quantize import QuantisedWeights
from caramba.model import Model, load_pretrained
from caramba.runs import MANIFEST, read_manifest, resolve_run
from caramba.runs.manifest import plugin_changes

Role = Literal["teacher", "student"]


@dataclass(frozen=True)
class ModelBundle:
    """A trained model in eval mode and where it came from.

    Of a file or folder of weights there is no run; `context` is then the longest sequence that its config.json or
    metadata states. `quantised` describes its weights if they have 8 or 4 bits.
    """

    model: Model
    path: Path
    labels: dict[str, str]
    run_dir: Path | None = None
    manifest: Manifest | None = None
    tokenizer: Tokenizer | None = None
    context: int | None = None
    quantised: QuantisedWeights | None = None

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name: those in memory, or those of the file, read one at a time, if the model is on meta."""
        if not next(self.model.parameters()).is_meta:
            return self.model.state_dict()
        return StoredWeights(index_tensors((self.path,)), str(self.path))

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model is known for: what learned positions allow, else what it trained on."""
        stated = self.model.spec.embedder.max_positions or self.context
        if stated is not None:
            return stated
        groups = self.manifest.groups_to_run() if self.manifest is not None else ()
        seen = [run.train.block_size for group in groups for run in group.runs if run.train is not None]
        return max(seen, default=2048)


def load_model(
    text: str,
    *,
    role: Role = "student",
    device: torch.device | str = "cpu",
    with_tokenizer: bool = True,
    tokenizer: str | None = None,
) -> ModelBundle:
    """Load a model from a run (directory, name or `latest`), weights file, export or Hugging Face folder.

    The device's kernels are attached unless its run asked for the reference.

    Args:
        with_tokenizer: whether to open the tokenizer: that of the run's data, or of the folder where it has one.
        tokenizer: another that takes its place: `byte`, a folder, or a file.
        device: where it goes; on `meta` a safetensors file is not read, see `ModelBundle.weights`.

    Raises:
        ConfigError: no such run.
        CheckpointError: nothing there holds weights of that role.
        DataError: the run's data, which holds its tokenizer, cannot be opened, or the tokenizer does not fit.
    """
    opened = _open(text, role, device, with_tokenizer and tokenizer is None)
    is_reference = opened.manifest is not None and opened.manifest.kernels == "reference"
    if torch.device(device).type != "meta":
        kernels.load(device, "reference" if is_reference else "auto")
    if tokenizer is None:
        return opened
    chosen, entries = load_tokenizer(tokenizer), opened.model.spec.embedder.vocab_size
    if chosen.vocab_size > entries:
        raise DataError(
            f"--tokenizer {tokenizer}: has {chosen.vocab_size} entries, the model of {opened.path} {entries}; name the "
            "tokenizer that it was trained with"
        )
    return dataclasses.replace(opened, tokenizer=chosen)


def _open(text: str, role: Role, device: torch.device | str, with_tokenizer: bool) -> ModelBundle:
    if not text:
        resolve_run(text)  # refuses it: an empty path is the folder that this is called in
    path = Path(text).expanduser()
    if is_gguf(path):
        return _open_weights(unpack_gguf(path), device, with_tokenizer)
    is_state = latest_sharded_state(path) is not None
    is_weights = is_state or (path.is_file() and path.name != MANIFEST)
    if is_weights or (path.is_dir() and not (path / MANIFEST).is_file() and _holds_model(path)):
        found = _run_of(path.resolve()) if is_weights else None
        if found is None:
            return _open_weights(find_checkpoint(path, role=role), device, with_tokenizer)
        run_dir, manifest, group = found
        weights = find_checkpoint(path, role=role)
    else:
        run_dir = resolve_run(text)
        manifest = _read(run_dir)
        group = manifest.groups_to_run()[-1]
        own = run_dir / "groups" / group.name
        weights = _weights_of(own if own.is_dir() else run_dir, role)
    if is_hf_folder(weights):  # as it was read: its own tokenizer goes with it, whatever text the run opened
        opened = _open_weights(weights, device, with_tokenizer)
        if opened.tokenizer is None and with_tokenizer:
            opened = dataclasses.replace(opened, tokenizer=_tokenizer_of(group, opened.model))
        return dataclasses.replace(opened, run_dir=run_dir, manifest=manifest)
    if not with_tokenizer:
        model, labels = load_pretrained(weights, device=device, where="RUN")
        return ModelBundle(model, weights, labels, run_dir, manifest)
    tokenizer = open_corpus(group.data).tokenizer
    model, labels = load_pretrained(
        weights, device=device, where="RUN", tokenizer_hash=tokenizer.hash if tokenizer is not None else ""
    )
    return ModelBundle(model, weights, labels, run_dir, manifest, tokenizer)


def _read(run_dir: Path) -> Manifest:
    manifest = read_manifest(run_dir)
    for line in plugin_changes(run_dir, manifest):
        logger.warning(f"{run_dir}: other source than it was trained with: {line}; its numbers may differ")
    return manifest


def _run_of(file: Path) -> tuple[Path, Manifest, GroupConfig] | None:
    """Return the run, its manifest and the group that wrote a file of a checkpoints folder; None for any other file."""
    folder = file.parent.parent  # of the run, or of a group in it
    run_dir = folder.parents[1] if folder.parent.name == "groups" else folder
    if file.parent.name != "checkpoints" or not (run_dir / MANIFEST).is_file():
        return None
    manifest = _read(run_dir)
    groups = manifest.groups_to_run()
    named = [group for group in groups if group.name == folder.name] if run_dir != folder else []
    return run_dir, manifest, (named or groups)[-1]


def _tokenizer_of(group: GroupConfig, model: Model) -> Tokenizer | None:
    """Return the tokenizer of a group's text for a model that is not its work; None where neither fits the other."""
    reads_text = bool(group.runs or group.benchmarks)
    tokenizer = open_corpus(group.data).tokenizer if reads_text else None
    fits = tokenizer is not None and tokenizer.vocab_size <= model.spec.embedder.vocab_size
    return tokenizer if fits else None


def _holds_model(folder: Path) -> bool:
    return is_hf_folder(folder) or is_dcp(folder) or any((folder / name).is_file() for name in EXPORTED)


def _open_weights(place: Path, device: torch.device | str, with_tokenizer: bool) -> ModelBundle:
    model, labels = load_pretrained(place, device=device, where="RUN")
    if not is_hf_folder(place):
        stated = read_model_metadata(place).get("max_positions")  # of an export
        return ModelBundle(model, place, labels, context=None if stated is None else int(stated))
    tokenizer = load_tokenizer(place) if with_tokenizer and (place / "tokenizer.json").is_file() else None
    context = read_hf_config(place).get("max_position_embeddings")
    return ModelBundle(model, place, labels, tokenizer=tokenizer, context=context)


def need_tokenizer(opened: ModelBundle, what: str) -> Tokenizer:
    """Return the tokenizer.

    Raises:
        ConfigError: the model's data does not say which tokenizer made it.
    """
    if opened.tokenizer is None:
        raise ConfigError(
            f"{what}: {opened.path} comes without a tokenizer (a bare token file or weights file does not name one); "
            "use a run whose data is a token folder or stdlib, a folder with tokenizer.json, or name one with "
            "--tokenizer where the command has it"
        )
    return opened.tokenizer


def _weights_of(folder: Path, role: Role) -> Path:
    found = find_checkpoint(folder, role=role)
    if found.is_dir():  # the Hugging Face folder that the run read
        return found
    trained = read_metadata(found).get("role")
    if trained != role and (trained == "teacher" or role == "teacher"):
        raise CheckpointError(
            f"{folder}: has no {role}, its weights are of a {trained} ({found.name}); use --which {trained}"
        )
    return found
