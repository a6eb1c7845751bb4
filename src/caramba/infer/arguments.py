"""Command-line arguments that `caramba generate` and `caramba chat` share: the model, and how to sample from it."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from caramba.config.benchmark import WeightFormat
from caramba.config.generate import GenerateConfig, SpeculativeConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.parse import parse_as
from caramba.console import logger
from caramba.data import Tokenizer
from caramba.errors import ConfigError, nearest
from caramba.infer.dialogue import read_template
from caramba.infer.eval_text import held_out_of
from caramba.infer.generator import Generator
from caramba.infer.model_bundle import ModelBundle, load_model, need_tokenizer
from caramba.infer.quantised import LAST_BITS, add_weights, calibration_config, quantise_opened
from caramba.infer.shared import refuse_ranks, share_layers
from caramba.infer.speculative import SpeculativeGenerator
from caramba.model import Model
from caramba.runtime import choose_device
from caramba.runtime.device import inference_dtype

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected true or false")
    return text == "true"


KEYS: dict[str, Callable[[str], Any]] = {
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
    "cache_budget_mb": float,
    "cache_quality_max_delta_nll": float,
    "cache_quality_max_ppl_ratio": float,
    "cache_quality_max_mean_kl": float,
    "cache_quality_max_tokens": int,
    "cache_quality_text": str,
    "cache_auto_benchmark": _switch,
    "cache_auto_bench_steps": int,
    "cache_plan": str,
    "cache_plan_path": str,
    "cache_plan_probe": _switch,
    "cache_plan_probe_interval_sec": float,
    "decode_plan": str,
    "decode_q_chunk": int,
    "decode_local_window": int,
    "compiled": lambda word: {"true": True, "false": False}.get(word, word),
}
SPECULATION: dict[str, Callable[[str], Any]] = {
    "spec_method": str,
    "spec_k": int,
    "spec_k_adaptive": _switch,
    "spec_extra_token": _switch,
    "spec_disable_below_accept": float,
    "hysteresis": float,
    "window": int,
    "retry_after": int,
    "spec_draft_layers": int,
    "max_ngram": int,
}


class ModelArguments(argparse.ArgumentParser):
    """Arguments that choose the model and how it is loaded; an error is a ConfigError that ends with the usage.

    `needed` are the words that the command cannot go without besides the model.
    """

    def __init__(self, command: str, needed: str = "") -> None:
        super().__init__(prog=f"caramba {command}", add_help=False, allow_abbrev=False)
        self.command, self.needed = command, needed
        self.add_argument("run")
        add_weights(self)
        self.add_argument("--which", default="student", choices=("teacher", "student"))
        self.add_argument("--tokenizer")
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
        self.add_argument("--dtype", choices=tuple(DTYPES))
        self.add_argument("--quiet", action="store_true")
        self.add_argument("--debug", action="store_true")

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if not unknown.strip():
            message += "'' (an empty word)"
        wrong = next(iter(unknown.split()), "").partition("=")[0]
        names = [option.removeprefix("--") for option in self._option_string_actions]
        near = nearest(wrong[2:], names).replace("mean '", "mean '--") if wrong.startswith("--") else ""
        raise ConfigError(
            f"{self.command}: {message}{near or ';'} caramba {self.command} RUN|DIR {self.needed}[options] "
            f"(all options: caramba {self.command} --help)"
        )


class GenerationArguments(ModelArguments):
    """A command's parser, with the words of a generation."""

    def __init__(self, command: str, needed: str = "") -> None:
        super().__init__(command, needed)
        for key, kind in KEYS.items():
            self.add_argument(f"--{key.replace('_', '-')}", type=kind)
        for key, kind in SPECULATION.items():
            self.add_argument(f"--{key.replace('_', '-')}", type=kind)
        self.add_argument("--draft")
        self.add_argument("--stop", action="append", default=[])


def sampling_config(words: argparse.Namespace) -> GenerateConfig:
    """Return the config fields that the arguments set, so that a wrong value fails before a model loads.

    Raises:
        ConfigError: a value out of range.
    """
    config = parse_as(GenerateConfig, _given(words, KEYS) | ({"stop": tuple(words.stop)} if words.stop else {}))
    calibration_config(words)
    speculation = _given(words, SPECULATION)
    method = parse_as(SpeculativeConfig, speculation).spec_method if speculation else None
    if (speculation and "spec_method" not in speculation) or (words.draft is not None and method != "draft"):
        raise ConfigError(
            "speculation: name --spec-method lookup or early_exit, or --spec-method draft with --draft RUN|DIR"
        )
    if method == "draft" and words.draft is None:
        raise ConfigError(
            "speculation: --spec-method draft needs a smaller model of the same tokenizer: --draft RUN|DIR"
        )
    return config


def open_generator(
    words: argparse.Namespace, config: GenerateConfig, mesh: DeviceMesh | None = None
) -> tuple[ModelBundle, Generator]:
    """Open the model and its tokenizer, and a generator that keeps within the model's context.

    The ranks of a mesh share the model's layers.

    Without `--max-new-tokens` it is the usual number, or half of a short context.

    Raises:
        ConfigError: no such run, or a model without a tokenizer.
    """
    opened, tokenizer = open_for_text(words, mesh)
    values: dict[str, Any] = {"eos_token_id": end_marks(opened, tokenizer)}
    limit = config.max_seq_len or opened.max_positions
    values["max_seq_len"] = limit
    if words.max_new_tokens is None:
        values["max_new_tokens"] = max(1, min(config.max_new_tokens, limit // 2))
    speculation = _given(words, SPECULATION)
    is_auto = config.cache_kind is KVCacheKind.AUTO
    values["held_out"] = held_out_of(opened) if is_auto and config.cache_quality_text is None else None
    if not speculation:
        return opened, Generator(opened.model, tokenizer, config, **values)
    if opened.quantised is not None and opened.quantised.form is WeightFormat.INT8_DYNAMIC:
        logger.warning(f"--spec-method {speculation['spec_method']} with {LAST_BITS}")
    values = config.model_dump(exclude_unset=True) | values | speculation
    draft = None if words.draft is None else _open_draft(words, opened)
    return opened, SpeculativeGenerator(opened.model, tokenizer, draft=draft, **values)


def open_for_text(words: argparse.Namespace, mesh: DeviceMesh | None = None) -> tuple[ModelBundle, Tokenizer]:
    """Load the model that the arguments name, in their dtype and weight format, and its tokenizer.

    Raises:
        ConfigError: no such run, a model without a tokenizer, or ranks without a mesh.
    """
    if mesh is None:
        refuse_ranks(words.command)
    opened = load_model(words.run, role=words.which, device=choose_device(words.device), tokenizer=words.tokenizer)
    tokenizer = need_tokenizer(opened, words.command)
    if (dtype := _dtype(words)) is not None:
        opened.model.to(dtype)
    if mesh is not None:
        share_layers(opened.model, mesh)
    quantised = quantise_opened(opened, words)
    if quantised is not None:
        logger.info(quantised.summary)
        opened = dataclasses.replace(opened, quantised=quantised)
    return opened, tokenizer


def end_marks(opened: ModelBundle, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text: the tokenizer's end mark, and those that the model's folder states."""
    return (tokenizer.eos_id, *_stated_ends(opened))


def chat_template(opened: ModelBundle, words: argparse.Namespace) -> str | None:
    """Return the chat template of the tokenizer's folder; None without one, and with --plain.

    Raises:
        ConfigError: the file cannot be read.
    """
    if words.plain:
        return None
    place = Path(words.tokenizer).expanduser() if words.tokenizer is not None else opened.path
    return read_template(place if place.is_dir() else place.parent)


def _given(words: argparse.Namespace, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(words, key) for key in keys if getattr(words, key) is not None}


def _open_draft(words: argparse.Namespace, target: ModelBundle) -> Model:
    """Open the draft model.

    Raises:
        ConfigError: it reads another tokenizer's tokens.
    """
    opened = load_model(words.draft, device=choose_device(words.device))
    mine, theirs = opened.tokenizer, target.tokenizer
    if mine is not None and theirs is not None and mine.hash != theirs.hash:
        raise ConfigError(
            f"speculation: the draft {words.draft} was trained with tokenizer {mine.name} ({mine.hash[:8]}), the model "
            f"with {theirs.name} ({theirs.hash[:8]}); use a draft of the same tokenizer"
        )
    dtype = _dtype(words)
    return opened.model if dtype is None else opened.model.to(dtype)


def _dtype(words: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype that was asked for, else the device's own; None keeps that of the weights."""
    return inference_dtype(choose_device(words.device)) if words.dtype is None else DTYPES[words.dtype]


def _stated_ends(opened: ModelBundle) -> tuple[int, ...]:
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
