"""Sizes of train=blockwise and train=upcycle that follow from a pretrained teacher and prepared text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from caramba.launch.freeze import scale_train


def tree(folder: Path, train: int = 40_000_000, context: int = 8192, width: int = 576) -> dict[str, Any]:
    (folder / "teacher").mkdir(exist_ok=True)
    config = {"max_position_embeddings": context, "hidden_size": width, "model_type": "llama"}
    (folder / "teacher" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    (folder / "text").mkdir(exist_ok=True)
    splits = {"train": {"tokens": train}, "val": {"tokens": train // 20}}
    (folder / "text" / "meta.json").write_text(json.dumps({"splits": splits}))
    phase = {"steps": 300, "batch_size": 8, "block_size": 128, "warmup_steps": 20, "lr": "auto"}
    control = {"control": True, "batch_size": 8, "block_size": 128}
    phases = {"pretrain": phase | {"steps": 1000}, "blockwise": phase, "drift": phase | {"steps": 50}}
    return {
        "model": {"teacher": {"checkpoint": str(folder / "teacher")}},
        "data": {"type": "tokens", "path": str(folder / "text")},
        "train": {"phases": {**phases, "teacher_continued": control}},
    }


@pytest.mark.parametrize(
    ("train", "context", "width", "window", "batch", "accumulation", "tokens"),
    [
        (40_000_000, 8192, 576, 2048, 32, 1, 32_768_000),
        (40_000_000, 1024, 2048, 1024, 8, 8, 32_768_000),
        (2_000_000, 8192, 576, 2048, 4, 1, 2_000_000),
        (100_000, 8192, 576, 256, 7, 1, 358_400),
    ],
)
def test_sizes_follow_from_text_and_teacher(
    tmp_path: Path,
    train: int,
    context: int,
    width: int,
    window: int,
    batch: int,
    accumulation: int,
    tokens: int,
) -> None:
    given = tree(tmp_path, train, context, width)
    phases = scale_train(given, [("data", "path")])["train"]["phases"]
    assert phases["pretrain"] == given["train"]["phases"]["pretrain"]
    for name in ("blockwise", "drift", "teacher_continued"):
        phase = phases[name]
        found = (phase["block_size"], phase["batch_size"], phase["gradient_accumulation_steps"])
        assert found == (window, batch, accumulation), name
    step = window * batch * accumulation
    total = (phases["blockwise"]["steps"] + phases["drift"]["steps"]) * step
    assert total == pytest.approx(tokens, rel=0.02)
    assert phases["blockwise"]["steps"] / phases["drift"]["steps"] == pytest.approx(6, rel=0.05)
    assert phases["blockwise"]["warmup_steps"] == round(0.06 * phases["blockwise"]["steps"])
    assert "steps" not in phases["teacher_continued"]


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ([("train", "steps")], {}),
        ([("train", "phases", "drift", "seq_len")], {}),
        ([], {"data": {"type": "stdlib"}}),
        ([], {"model": {"teacher": {"checkpoint": "runs/x"}}}),
        ([], {"model": {}}),
    ],
)
def test_everything_else_stays_as_written(tmp_path: Path, given: list[Any], change: dict[str, Any]) -> None:
    before = tree(tmp_path) | change
    assert scale_train(before, given) == before
