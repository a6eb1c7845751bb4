"""The words that `caramba generate` and `caramba chat` share: which model, and how text is drawn from it."""

from __future__ import annotations

import argparse
import json
from typing import Any, NoReturn

import torch

from caramba.config.generate import GenerateConfig
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from caramba.infer.generator import Generator
from caramba.infer.opened import OpenedModel, need_tokenizer, open_model
from caramba.runtime import choose_device

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEYS = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
    "max_new_tokens": int,
    "max_seq_len": int,
    "cache_kind": str,
    "prefill_chunk": int,
}
OPTIONS = "".join(f" [--{key.replace('_', '-')} {key[0].upper()}]" for key in KEYS)


class Arguments(argparse.ArgumentParser):
    """A command's parser: a mistake is a ConfigError that ends with the usage."""

    def __init__(self, command: str, own: str) -> None:
        super().__init__(prog=f"caramba {command}", add_help=False, allow_abbrev=False)
        self.command, self.own = command, own
        self.add_argument("run")
        for key, kind in KEYS.items():
            self.add_argument(f"--{key.replace('_', '-')}", type=kind)
        self.add_argument("--stop", action="append", default=[])
        self.add_argument("--which", default="student", choices=("teacher", "student"))
        self.add_argument("--tokenizer")
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
        self.add_argument("--dtype", choices=tuple(DTYPES))
        self.add_argument("--quiet", action="store_true")
        self.add_argument("--debug", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.command}: {message}; caramba {self.command} RUN|DIR {self.own}{OPTIONS}")


def sampling_config(words: argparse.Namespace) -> GenerateConfig:
    """Return what the words set of the config, and nothing else, so that a wrong value fails before a model loads.

    Raises:
        ConfigError: a value out of range.
    """
    given = {key: getattr(words, key) for key in KEYS if getattr(words, key) is not None}
    config = parse_as(GenerateConfig, given | ({"stop": tuple(words.stop)} if words.stop else {}))
    if config.cache_kind == "auto":
        raise ConfigError("cache_kind=auto is not built yet: it comes with the inference work; name a kind")
    return config


def open_generator(words: argparse.Namespace, config: GenerateConfig) -> tuple[OpenedModel, Generator]:
    """Open the model and its tokenizer, and a generator that keeps within the model's context.

    Without `--max-new-tokens` it is the usual number, or half of a short context.

    Raises:
        ConfigError: no such run, or a model without a tokenizer.
    """
    opened = open_model(
        words.run, role=words.which, device=choose_device(words.device), tokenizer=words.tokenizer
    )
    tokenizer = need_tokenizer(opened, words.command)
    if words.dtype is not None:
        opened.model.to(DTYPES[words.dtype])
    values: dict[str, Any] = {"eos_token_id": (tokenizer.eos_id, *_stated_ends(opened))}
    limit = config.max_seq_len or opened.max_positions
    values["max_seq_len"] = limit
    if words.max_new_tokens is None:
        values["max_new_tokens"] = max(1, min(config.max_new_tokens, limit // 2))
    return opened, Generator(opened.model, tokenizer, config, **values)


def _stated_ends(opened: OpenedModel) -> tuple[int, ...]:
    """Return the end marks of a folder's generation_config.json: chat models end a turn with a mark of their own."""
    file = opened.path / "generation_config.json"
    if not opened.path.is_dir() or not file.is_file():
        return ()
    try:
        stated = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: not a JSON object ({error}); copy the folder again") from None
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(isinstance(item, int) and item >= 0 for item in ids):
        raise ConfigError(f"{file}: eos_token_id is {stated!r}, expected a token id or a list of them")
    return tuple(ids)
