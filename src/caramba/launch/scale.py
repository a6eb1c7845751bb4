"""Steps, batch and window of `train=blockwise` and `train=upcycle` for a pretrained teacher and prepared text."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from caramba.config.hf import is_hf_folder, read_hf_config
from caramba.config.source import is_mapping

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
    if not isinstance(place, str) or not is_hf_folder(folder := Path(place).expanduser()):
        return None
    config = read_hf_config(folder)
    context, width = config.get("max_position_embeddings"), config.get("hidden_size")
    return (context, width) if isinstance(context, int) and isinstance(width, int) else None


def _text_tokens(tree: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of train and val of a token folder, else None; the data's own checks name what is wrong."""
    data = tree.get("data")
    place = data.get("path") if is_mapping(data) and data.get("type") == "tokens" else None
    if not isinstance(place, str) or not os.path.isfile(Path(place).expanduser() / "meta.json"):
        return None
    try:
        splits = json.loads((Path(place).expanduser() / "meta.json").read_text(encoding="utf-8"))["splits"]
        train = int(splits["train"]["tokens"])
        # Without a split of its own the data holds out the end of train.
        return train, int(splits["val"]["tokens"]) if "val" in splits else max(train // 20, 2)
    except (OSError, ValueError, KeyError, TypeError):
        return None
