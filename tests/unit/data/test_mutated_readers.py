"""Mutants of every format that is read back; scripts/faults/mutate_readers.py reads many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.faults import mutate_readers

from caramba.config.source import MAX_DEPTH, parse_object, read_object
from caramba.data.folder import open_token_folder, write_token_folder
from caramba.data.tokenizer import MAX_BPE_SIZE, train_bpe
from caramba.errors import CheckpointError, ConfigError, DataError
from caramba.launch.commands.prepare import main


def test_mutants_of_each_format_open_or_are_refused_by_name() -> None:
    result = mutate_readers.run(3, 40)
    assert result["wrong"] == 0, result["examples"]
    assert all(min(found.values()) > 0 for found in result["counts"].values())


def test_read_object_beyond_its_limits_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        read_object(file, CheckpointError, "fix")
    file.write_text('{"a": "' + "x" * 200 + '"}')
    with pytest.raises(CheckpointError, match=r"config\.json: 209 bytes, expected at most 100"):
        read_object(file, CheckpointError, "fix", max_bytes=100)
    text = '{"a": ' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert parse_object(text, "x", DataError, "fix")
    with pytest.raises(DataError, match="x: nested deeper than"):
        parse_object('{"a": ' + text + "}", "x", DataError, "fix")


def test_train_bpe_of_a_billion_entries_is_refused_before_it_allocates(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    for size in ("1000000000", "9" * 5000):
        with pytest.raises(ConfigError, match=f"to {MAX_BPE_SIZE:,} entries"):
            main(["text", str(tmp_path / "t.txt"), "--output", str(tmp_path / "o"), "--train-bpe", size])
    with pytest.raises(DataError, match="at most"):
        train_bpe(["text"], 10**9)
    assert not (tmp_path / "o").exists()


def test_messages_about_a_token_folder_quote_its_facts_in_part(tmp_path: Path) -> None:
    bpe = train_bpe(["some text to train a tokenizer on " * 20], 280)
    write_token_folder(tmp_path / "t", {"train": ["some text " * 50], "val": ["more"]}, bpe, {"corpus": "x"})
    meta = json.loads((tmp_path / "t" / "meta.json").read_text())
    del meta["checksums"]
    (tmp_path / "t" / "checksums.json").unlink()
    for key, change in {"documents": meta["splits"]["train"], "schema": meta}.items():
        kept, change[key] = change[key], "x" * 5000
        (tmp_path / "t" / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(DataError, match="xxx") as refused:
            open_token_folder(tmp_path / "t").documents("train")
        assert len(str(refused.value)) < 500, key
        change[key] = kept
