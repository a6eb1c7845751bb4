"""Opens what a user calls RUN: its model, and the tokenizer of the data that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from caramba.checkpoint import read_metadata
from caramba.config.manifest import Manifest
from caramba.data import Tokenizer, open_corpus
from caramba.errors import CheckpointError, ConfigError
from caramba.model import Model, find_checkpoint, load_pretrained
from caramba.runs import read_manifest, resolve_run

Role = Literal["teacher", "student"]


@dataclass(frozen=True)
class OpenedModel:
    """A trained model in eval mode and where it came from; of a bare weights file there is no run and no tokenizer."""

    model: Model
    path: Path
    labels: dict[str, str]
    run_dir: Path | None = None
    manifest: Manifest | None = None
    tokenizer: Tokenizer | None = None

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model is known for: what learned positions allow, else what it trained on."""
        learned = self.model.spec.embedder.max_positions
        if learned is not None:
            return learned
        groups = self.manifest.selected_groups() if self.manifest is not None else ()
        seen = [run.train.block_size for group in groups for run in group.runs if run.train is not None]
        return max(seen, default=2048)


def open_model(
    text: str, *, role: Role = "student", device: torch.device | str = "cpu", with_tokenizer: bool = True
) -> OpenedModel:
    """Load the model of `role` from a run (a directory, a name, or `latest`) or from a weights file.

    Raises:
        ConfigError: no such run.
        CheckpointError: nothing there holds weights of that role.
        DataError: the run's data, which holds its tokenizer, cannot be opened.
    """
    path = Path(text).expanduser()
    if path.is_file() and path.name != "manifest.json":
        model, labels = load_pretrained(path, device=device, where="RUN")
        return OpenedModel(model, path, labels)
    run_dir = resolve_run(text)
    manifest = read_manifest(run_dir)
    group = manifest.selected_groups()[-1]
    own = run_dir / "groups" / group.name
    weights = _weights_of(own if own.is_dir() else run_dir, role)
    if not with_tokenizer:
        model, labels = load_pretrained(weights, device=device, where="RUN")
        return OpenedModel(model, weights, labels, run_dir, manifest)
    tokenizer = open_corpus(group.data).tokenizer
    model, labels = load_pretrained(
        weights, device=device, where="RUN", tokenizer_hash=tokenizer.hash if tokenizer is not None else ""
    )
    return OpenedModel(model, weights, labels, run_dir, manifest, tokenizer)


def need_tokenizer(opened: OpenedModel, what: str) -> Tokenizer:
    """Return the tokenizer.

    Raises:
        ConfigError: the model's data does not say which tokenizer made it.
    """
    if opened.tokenizer is None:
        raise ConfigError(
            f"{what}: {opened.path} comes without a tokenizer (a bare token file or weights file does not name one); "
            "use a run whose data is a token folder or stdlib"
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
