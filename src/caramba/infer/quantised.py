"""`--weights`: a model that was opened, with weights of 8 or 4 bits, and the text that its ranges come from."""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba.config.benchmark import CalibrationConfig, WeightFormat
from caramba.config.parse import parse_as
from caramba.data.folder import Tokens
from caramba.errors import ConfigError
from caramba.infer.eval_text import EvalText, corpus_of
from caramba.infer.model_bundle import ModelBundle
from caramba.lower.quantize import QuantisedWeights, linear_layers, observe_ranges, quantise_weights

WINDOW = 512
KEYS: dict[str, Callable[[str], Any]] = {"method": str, "percentile": float, "tokens": int}
"""Keys of CalibrationConfig, on the command line behind `--weights-calibration`."""

LAST_BITS = (
    "--weights int8_dynamic: sums over several tokens at once end in other last bits than over one, and an activation "
    "on the border of two codes makes up to some 0.02 nats of that; where two tokens are as close, the text may be "
    "another than without speculation"
)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the options of quantised weights."""
    parser.add_argument("--weights", choices=tuple(form.value for form in WeightFormat))
    parser.add_argument("--weights-head", action="store_true")
    parser.add_argument("--weights-text")
    for key, kind in KEYS.items():
        parser.add_argument(f"--weights-calibration-{key}", type=kind)


def calibration_config(words: argparse.Namespace) -> CalibrationConfig:
    """Return what the words set of a calibration, refused before a model loads.

    Raises:
        ConfigError: a value out of range, or options of a format that is not asked for.
    """
    given = {key: getattr(words, f"weights_calibration_{key}") for key in KEYS}
    given = {key: value for key, value in given.items() if value is not None}
    if words.weights is None and words.weights_head:
        raise ConfigError("--weights-head is of quantised weights; name --weights int8, int4 or int8_dynamic")
    if (given or words.weights_text) and words.weights != WeightFormat.INT8_DYNAMIC.value:
        option = f"calibration-{next(iter(given))}" if given else "text"
        raise ConfigError(
            f"--weights-{option}: ranges are of --weights int8_dynamic, got {words.weights}; leave it out"
        )
    try:
        return parse_as(CalibrationConfig, given)
    except ConfigError as error:
        raise ConfigError(f"--weights-calibration: {error}") from None


def quantise_opened(opened: ModelBundle, words: argparse.Namespace) -> QuantisedWeights | None:
    """Quantise the weights of an opened model as the words ask for; None where they do not.

    Raises:
        ConfigError: no text to calibrate on, or no layer to quantise.
        KernelUnavailable: torchao is missing or has no kernel for this.
    """
    if words.weights is None:
        return None
    config, form = calibration_config(words), WeightFormat(words.weights)
    ranges = None
    if form is WeightFormat.INT8_DYNAMIC:
        windows = calibration_windows(training_text(opened, words.weights_text), config.tokens)
        device = opened.model.embedder.token.weight.device
        found = linear_layers(opened.model, form, device, with_head=words.weights_head)
        ranges = observe_ranges(opened.model, found.layers, windows, config)
    return quantise_weights(opened.model, form, with_head=words.weights_head, ranges=ranges)


def training_text(opened: ModelBundle, named: str | None) -> Tokens:
    """Return the tokens of a named text, else those that the run trained on: its held-out ones judge, they do not fit.

    Raises:
        ConfigError: neither is there.
    """
    if named is not None:
        vocab_size = opened.model.spec.embedder.vocab_size
        tokens = EvalText.of_file(named, opened.tokenizer, vocab_size, "--weights-text").tokens
        assert tokens is not None
        return tokens
    corpus = corpus_of(opened, "--weights-text FILE")
    if isinstance(corpus, str):
        raise ConfigError(f"--weights int8_dynamic: needs a text to take ranges of activations from; {corpus}")
    return corpus.train


def calibration_windows(tokens: Tokens, n_tokens: int) -> list[Tensor]:
    """Return windows of up to 512 ids, evenly spaced over `tokens`, at most `n_tokens` in all."""
    size = min(WINDOW, n_tokens, tokens.size)
    count = max(1, min(n_tokens, tokens.size) // max(size, 1))
    starts = [index * (tokens.size - size) // max(count - 1, 1) for index in range(count)]
    return [torch.from_numpy(np.asarray(tokens[at : at + size]).astype(np.int64)) for at in starts]
