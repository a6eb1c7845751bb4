"""Texts unlike the run's: how they are made, what they cost a student, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.infer.test_generator import byte_spec

from caramba.config.verify import FidelityVerifyConfig
from caramba.data import ByteTokenizer, TokenDataset
from caramba.errors import ConfigError
from caramba.evaluation.verification import check_other_texts, fidelity, open_other_text, space_marks
from caramba.model import build_model

TOKENIZER = ByteTokenizer()
TEXT = "It is (so), that x=1; isn't it? " * 40
OWN = TokenDataset(np.frombuffer(TEXT.encode(), dtype=np.uint8).astype(np.int64), 32)


def opened(name: str, **options: object) -> TokenDataset:
    given = {"vocab_size": 257, "block_size": 32, "windows": 6} | options
    return open_other_text(name, OWN, TOKENIZER, **given)  # type: ignore[arg-type]


def test_punctuation_gets_spaces_as_in_wikitext() -> None:
    assert space_marks("It is (so), that x=1; isn't.") == "It is ( so ), that x = 1 ; isn ' t ."


def test_texts_are_windows_of_the_runs_tokenizer(tmp_path: Path) -> None:
    python, spaced = opened("python"), opened("spaced")
    assert len(python) == len(spaced) == 6
    first = TOKENIZER.decode(spaced[0][0].tolist())
    assert "( so )" in first
    (tmp_path / "a.txt").write_text("plain text of another kind. " * 20)
    assert TOKENIZER.decode(opened(str(tmp_path / "a.txt"))[0][0].tolist()).startswith("plain text")
    for name, message in (
        ("nowhere.txt", "No such file"),
        (str(tmp_path / "a.txt"), "one window needs 2001"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(name, block_size=2000 if "needs" in message else 32)
    with pytest.raises(ConfigError, match="does not exist; use python, spaced"):
        check_other_texts(["python", "nowhere"], TOKENIZER)
    assert check_other_texts(["python", "spaced", str(tmp_path)], None) == (str(tmp_path),)


def test_fidelity_names_the_window_and_every_text() -> None:
    teacher, student = (build_model(byte_spec(), seed=seed) for seed in (0, 1))
    config = FidelityVerifyConfig(type="fidelity", batches=2, batch_size=2, block_size=32, texts=("python", "spaced"))
    checks = {
        check.name: check.value for check in fidelity(teacher, student, OWN, config, torch.device("cpu"), TOKENIZER)
    }
    assert checks["window_tokens"] == 32
    for name in ("python", "spaced"):
        assert {f"ppl_ratio_on_{name}", f"kl_on_{name}", f"ppl_ratio_on_{name}_at_16_31"} <= set(checks)
    assert checks["kl_on_python"] != checks["kl"]
