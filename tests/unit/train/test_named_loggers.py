"""Lightning's loggers by class name: one that cannot begin is an error of its user."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from caramba.errors import ConfigError
from caramba.train.loggers.named import build_named_loggers


def test_a_logger_that_cannot_begin_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: CSVLogger, **arguments: object) -> None:
        raise ValueError("needs a key")

    monkeypatch.setattr(CSVLogger, "__init__", fails)
    with pytest.raises(ConfigError, match=r"logger.lightning.CSVLogger: .*ValueError: needs a key"):
        build_named_loggers({"CSVLogger": {}}, tmp_path, "pretrain")
