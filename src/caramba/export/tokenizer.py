"""A run's tokenizer as the files that transformers' AutoTokenizer loads, with equal ids for equal text."""

import json
from pathlib import Path
from typing import Any

from caramba.config.hf import is_hf_folder
from caramba.data import ByteTokenizer, Tokenizer, load_tokenizer
from caramba.data.tokenizer import BYTE_LEVEL, EOS, bpe_definition, byte_letters, token_entry
from caramba.infer.dialogue import read_template
from caramba.infer.model_bundle import ModelBundle
from caramba.runs.files import write_json, write_whole


def write_tokenizer(folder: Path, tokenizer: Tokenizer, *, max_positions: int) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json, and return their names.

    No mark is added to text and a literal end mark in it stays text, as when the tokens were made.
    """
    definition = definition_of(tokenizer)
    end = _mark(tokenizer.eos_id, json.loads(definition))
    write_whole(folder / "tokenizer.json", definition)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "eos_token": end,
        "pad_token": end,
    }
    start = _mark(tokenizer.bos_id, json.loads(definition)) if tokenizer.bos_id is not None else None
    if start is not None:
        config |= {"bos_token": start, "add_bos_token": tokenizer.adds_bos}
    write_json(folder / "tokenizer_config.json", config)
    return ["tokenizer.json", "tokenizer_config.json"]


def find_template(opened: ModelBundle) -> str | None:
    """Return the chat template of a model's folder, or of the folder that a run's teacher or start came from.

    The latter only where its tokenizer is the model's.

    Raises:
        ConfigError: the file cannot be read.
    """
    if is_hf_folder(opened.path):
        return read_template(opened.path)
    model = None if opened.manifest is None else opened.manifest.model
    if model is None or opened.tokenizer is None:
        return None
    places = [model.teacher.checkpoint if model.teacher is not None else None, model.path]
    for folder in (Path(place).expanduser() for place in places if place is not None):
        has_tokenizer = folder.is_dir() and is_hf_folder(folder) and (folder / "tokenizer.json").is_file()
        if has_tokenizer and load_tokenizer(folder).hash == opened.tokenizer.hash:
            return read_template(folder)
    return None


def definition_of(tokenizer: Tokenizer) -> str:
    """Return the text of a tokenizer.json."""
    return json.dumps(_byte_definition()) if isinstance(tokenizer, ByteTokenizer) else tokenizer.definition


def _mark(index: int, definition: dict[str, Any]) -> str:
    added = {item["id"]: item["content"] for item in definition.get("added_tokens", [])}
    if index in added:
        return added[index]
    return {number: token for token, number in definition["model"]["vocab"].items()}[index]


def _byte_definition() -> dict[str, Any]:
    """Spell the byte tokenizer as a byte-level BPE without merges: entry b is byte b, 256 the end mark."""
    return bpe_definition(
        {**byte_letters(), EOS: 256},
        [],
        added=[token_entry(256, EOS)],
        pre_tokenizer=BYTE_LEVEL | {"use_regex": False},
        decoder=BYTE_LEVEL | {"add_prefix_space": True},
    )
