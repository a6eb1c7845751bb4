"""Loads what was exported in the engine that it is for, and compares it with the model."""

import ctypes
import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba.config.optional_deps import need_library
from caramba.errors import CheckpointError
from caramba.infer.model_bundle import ModelBundle

PROMPT = "The history of the town begins with a bridge over the river, and with the people who built it."
NEW_TOKENS = 32
LARGEST_ERROR = 1e-4
"""Of logits in transformers, both in float32; llama.cpp computes in 16 bits, so there only the text must be equal."""
_CACHE_LINE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers")
_TIE = 0.1


@dataclass(frozen=True)
class Comparison:
    """What an engine computes against the model: the largest difference of logits, and greedy continuations.

    `gap` is what separates the model's first two logits where the continuations part, None where they are equal.
    `cache` reports the engine's own cache, if it has one to report.
    """

    engine: str
    logits: float
    n_equal: int
    gap: float | None
    cache: str | None = None

    def describe(self) -> str:
        """Return one line about it."""
        text = f"check in {self.engine}: logits differ by at most {self.logits:.2g}; "
        if self.gap is None:
            text += f"{self.n_equal} greedy tokens are equal"
        else:
            text += f"greedy tokens part after {self.n_equal}, where the first two logits differ by {self.gap:.2g}"
        return text if self.cache is None else f"{text}; {self.cache}"


@torch.no_grad()
def check_folder(opened: ModelBundle, folder: Path) -> Comparison:
    """Compare a Hugging Face folder in transformers, in float32.

    Raises:
        CheckpointError: transformers computes other logits or another text.
    """
    need_library("transformers", "eval", "export --check")
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    theirs = load(folder, dtype=torch.float32, trust_remote_code=any(folder.glob("*.py"))).eval()
    prompt = _prompt(opened)
    logits = float((theirs(prompt).logits - opened.model(prompt)).abs().max())
    found = theirs.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    result = _compare(opened, "transformers", logits, prompt, found[0, prompt.shape[1] :].tolist(), None)
    return _accept(result, folder, LARGEST_ERROR)


def check_gguf(opened: ModelBundle, file: Path) -> Comparison | None:
    """Compare a GGUF file in llama.cpp, on the CPU; None where llama-cpp-python is not installed.

    Raises:
        CheckpointError: llama.cpp does not load it, or its text parts from the model's where there is no tie.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    llama_cpp: Any = importlib.import_module("llama_cpp")

    lines: list[str] = []

    def keep(_level: int, text: bytes, _data: ctypes.c_void_p) -> None:
        lines.append(text.decode(errors="replace"))

    callback = llama_cpp.llama_log_callback(keep)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    prompt = _prompt(opened)
    ids = prompt[0].tolist()
    try:
        engine: Any = llama_cpp.Llama(
            str(file),
            n_ctx=len(ids) + NEW_TOKENS,
            logits_all=True,
            verbose=True,
            n_threads=torch.get_num_threads(),
        )
    except ValueError as error:
        cause = next((line.strip() for line in reversed(lines) if "error" in line.lower()), str(error))
        raise CheckpointError(f"{file}: llama.cpp does not load it: {cause[:200]}") from None
    engine.eval(ids)
    logits = torch.from_numpy(engine.scores[: len(ids)].copy())
    text: list[int] = []
    for _ in range(NEW_TOKENS):
        text.append(int(engine.scores[engine.n_tokens - 1].argmax()))
        engine.eval(text[-1:])
    engine.close()
    with torch.no_grad():
        largest = float((logits - opened.model(prompt)[0]).abs().max())
    return _accept(_compare(opened, "llama.cpp", largest, prompt, text, _cache(lines)), file, None)


def _prompt(opened: ModelBundle) -> Tensor:
    ids = opened.tokenizer.encode(PROMPT) if opened.tokenizer is not None else list(range(16))
    return torch.tensor([ids[: max(2, opened.max_positions - NEW_TOKENS)]])


@torch.no_grad()
def _compare(
    opened: ModelBundle, engine: str, logits: float, prompt: Tensor, theirs: list[int], cache: str | None
) -> Comparison:
    text = torch.cat((prompt, torch.tensor([theirs])), 1)
    ours = opened.model(text)[0, prompt.shape[1] - 1 : -1]
    for index, token in enumerate(theirs):
        row = ours[index]
        if int(row.argmax()) != token:
            return Comparison(engine, logits, index, float(row.max() - row[token]), cache)
    return Comparison(engine, logits, len(theirs), None, cache)


def _accept(result: Comparison, place: Path, most: float | None) -> Comparison:
    is_tie = result.gap is None or result.gap < _TIE
    if (most is not None and not result.logits <= most) or not is_tie:
        raise CheckpointError(f"{place}: {result.describe()}, expected the model's own; report this with the model")
    return result


def _cache(lines: list[str]) -> str | None:
    found = _CACHE_LINE.search("".join(lines))
    if found is None:
        return None
    size, cells, layers = float(found[1]), int(found[2]), int(found[3])
    per_token = size * 2**20 / cells / layers
    return f"its cache is {size} MiB of {cells} tokens in {layers} layers, {per_token:.0f} bytes a token and layer"
