"""Mutants of every format that is read back open, or are refused with exit status 2 and the file's name."""

from __future__ import annotations

import collections
import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caramba.config.hf import is_hf_folder, spec_of_folder
from caramba.config.source import MAX_DEPTH, parse_object, read_object
from caramba.data.checkpoint import index_tensors, load_tensors, save_tensors
from caramba.data.checkpoint.hf_names import hf_names
from caramba.data.folder import open_npy, open_token_folder, write_token_folder
from caramba.data.tokenizer import MAX_BPE_SIZE, train_bpe
from caramba.data.tokenizer_files import load_tokenizer
from caramba.errors import CarambaError, CheckpointError, ConfigError, DataError
from caramba.launch.commands.prepare import main
from caramba.model import build_model, load_hf_folder
from tests.examples import examples
from tests.limits import limited_memory

MEMORY_BYTES = 500 << 20
CPU_S = 20.0  # which grow with what else runs on a core
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**12, 10**400, 1e308, float("nan"), "", "x" * 5000, "../../etc/passwd", "\0"),
    *([], {}, [[]], {"a": []}, [1, "a", None], json.loads("[" * 60 + "]" * 60)),
)
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32},
    **{"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu"},
    **{"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def make_files(folder: Path) -> dict[str, tuple[Path, Callable[[], Any], bool]]:
    """Write a file of each format; return its path, its reader, and whether all of it is JSON."""
    weights = folder / "weights.safetensors"
    save_tensors(weights, {"a": torch.ones(3, 4), "b": torch.zeros(5)}, {"format": "pt"})
    bpe = train_bpe(["some text to train a tokenizer on " * 20], 280)
    tokens = folder / "tokens"
    write_token_folder(tokens, {"train": ["some text " * 50], "val": ["more"]}, bpe, {"corpus": "x"})
    # Checked by its sum, no mutant would come to a reader.
    meta = json.loads((tokens / "meta.json").read_text())
    del meta["checksums"]
    (tokens / "meta.json").write_text(json.dumps(meta))
    (tokens / "checksums.json").unlink()
    model = folder / "model"
    model.mkdir()
    bpe.save(model / "tokenizer.json")
    (model / "config.json").write_text(json.dumps(LLAMA))
    weights_of_model = _llama_weights(model)
    save_tensors(model / "model.safetensors", weights_of_model, {"format": "pt"})
    sharded = folder / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(LLAMA))
    parts = {f"model-{i}.safetensors": sorted(weights_of_model)[i::2] for i in range(2)}
    for name, names in parts.items():
        save_tensors(sharded / name, {each: weights_of_model[each] for each in names}, {"format": "pt"})
    index = {"weight_map": {each: name for name, names in parts.items() for each in names}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    flat = folder / "flat.npy"
    np.save(flat, np.arange(100, dtype=np.uint16))

    def read_weights() -> None:
        index_tensors((weights,))
        load_tensors(weights)

    def read_tokens() -> None:
        opened = open_token_folder(tokens)
        opened.train[:8].sum()
        _ = opened.token_bytes
        for split in opened.meta["splits"]:
            opened.documents(split)

    def read_config() -> None:
        is_hf_folder(model)
        load_hf_folder(model)

    return {
        "safetensors": (weights, read_weights, False),
        "meta": (tokens / "meta.json", read_tokens, True),
        "tokenizer": (model / "tokenizer.json", lambda: load_tokenizer(model), True),
        "tokenizer_config": (model / "tokenizer_config.json", lambda: load_tokenizer(model), True),
        "npy": (flat, lambda: open_npy(flat).sum(), False),
        "config": (model / "config.json", read_config, True),
        "index": (sharded / "model.safetensors.index.json", lambda: load_hf_folder(sharded), True),
    }


def _llama_weights(folder: Path) -> dict[str, torch.Tensor]:
    spec = spec_of_folder(folder)
    state, names = build_model(spec).state_dict(), hf_names(spec)
    return {names[name]: value for name, value in state.items() if name in names}


def _mutate_json(value: Any, rng: random.Random) -> Any:
    """Replace, drop or rename one value of a JSON document."""
    places: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        item = level.pop()
        keys = list(item) if isinstance(item, dict) else list(range(len(item)))
        places += [(item, key) for key in keys]
        level += [item[key] for key in keys if isinstance(item[key], dict | list)]
    if not places:
        return rng.choice(VALUES)
    item, key = rng.choice(places)
    action = rng.randrange(5)
    if action == 0:
        del item[key]
    elif action == 1 and isinstance(item, dict):
        item[str(key) + "x"] = item.pop(key)
    elif action == 2 and isinstance(item[key], int):
        item[key] = item[key] * rng.choice((-1, 2, 10**6, 10**15)) + rng.choice((0, 1))
    else:
        item[key] = rng.choice(VALUES)
    return value


def _mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.choice((b"", b"{", b"[" * 100_000, content[: rng.randrange(len(content))], content * 2))
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(min(len(changed), 400))] = rng.randrange(256)
    return bytes(changed)


def mutate(content: bytes, rng: random.Random, *, is_json: bool, is_safetensors: bool) -> bytes:
    """Return a mutant of a file: of its JSON, where it has one, or of its bytes."""
    if rng.random() < 0.4 or not (is_json or is_safetensors):
        return _mutate_bytes(content, rng)
    if is_json:
        return json.dumps(_mutate_json(json.loads(content), rng)).encode()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(_mutate_json(json.loads(content[8 : 8 + length]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def read_mutant(read: Callable[[], Any], where: str) -> tuple[str, str]:
    """Read one mutant; return its outcome and its fault, empty for none."""
    outcome, fault, began = "opened", "", time.process_time()
    try:
        read()
    except CarambaError as error:
        outcome, text = "refused", str(error)
        # A token folder has several files, and the one that differs from meta.json may be named.
        if error.exit_status != 2 or where not in text or len(text) > 2000:
            fault = text[:300]
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome, fault = "crashed", f"{type(error).__name__}: {str(error)[:300]}"
    cpu_s = time.process_time() - began
    if not fault and cpu_s > CPU_S:
        fault = f"{cpu_s:.1f} s of CPU"
    return outcome, fault


def test_mutants_of_each_format_open_or_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    for name, (file, reader, is_json) in make_files(tmp_path).items():
        reader()
        intact, counts = file.read_bytes(), collections.Counter[str]()
        with limited_memory(MEMORY_BYTES):
            for index in range(examples(120)):
                chance = random.Random(f"3:{name}:{index}")
                changed = mutate(intact, chance, is_json=is_json, is_safetensors=name == "safetensors")
                file.write_bytes(changed)
                outcome, fault = read_mutant(reader, str(file.parent))
                assert not fault, f"{name} {index}: {fault}"
                counts[outcome] += 1
        file.write_bytes(intact)
        assert counts["opened"], name
        assert counts["refused"], name


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
