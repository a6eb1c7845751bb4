"""Folders that are incomplete, damaged or of another network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from folders import write
from safetensors.torch import load_file, save_file

from caramba.config.hf import spec_of_folder
from caramba.config.model import ModelSpec
from caramba.data.checkpoint import index_tensors, stream_into
from caramba.data.checkpoint.locate import find_checkpoint, find_loaded_folder, record_loaded
from caramba.errors import CheckpointError
from caramba.model import build_model, load_hf_folder, load_pretrained

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "m", "llama31_gqa")
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write(tmp_path / "m", "llama31_gqa", shard="20KB")
    return tmp_path / "m"


def rewrite(file: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)


def test_tensors_that_do_not_fit_are_named_with_both_shapes_and_the_file(folder: Path) -> None:
    rewrite(
        folder / "model.safetensors",
        **{Q: torch.zeros(32, 16), "model.norm.weight": None, "odd": torch.zeros(3)},
    )
    with pytest.raises(CheckpointError) as caught:
        load_hf_folder(folder)
    text = str(caught.value)
    assert f"{Q} in model.safetensors: expected [32, 32] float32, found [32, 16] float32" in text
    assert "missing model.norm.weight [32] float32" in text
    assert "unexpected odd [3] float32 in model.safetensors" in text
    assert "3 of 21 tensors differ" in text
    assert "download it again" in text


def test_nothing_is_written_before_everything_fits(folder: Path) -> None:
    model = build_model(spec_of_folder(folder), seed=0)
    before = model.embedder.token.weight.clone()
    with pytest.raises(CheckpointError, match=r"missing embedder\.token\.weight"):
        stream_into(model, {}, where="x")
    assert torch.equal(model.embedder.token.weight, before)


def test_integer_weights_are_refused(folder: Path) -> None:
    rewrite(folder / "model.safetensors", **{Q: torch.zeros(32, 32, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"expected \[32, 32\] float32, found \[32, 32\] int8"):
        load_hf_folder(folder)


def test_missing_and_damaged_files(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match=rf"{files[0].name}: the file is truncated: \d+ bytes, .* copy it again"):
        load_hf_folder(sharded)
    files[0].unlink()
    with pytest.raises(
        CheckpointError, match=rf"1 of the {len(files)} files .* are missing: {files[0].name}; download"
    ):
        load_hf_folder(sharded)
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="which is not a file of the same folder"):
        load_hf_folder(sharded)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: not readable as JSON"):
        load_hf_folder(sharded)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"has no weights; expected model.safetensors, or .*index.json"):
        load_hf_folder(sharded)
    torch.save({}, sharded / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles run code when they are loaded; expected safetensors"):
        load_hf_folder(sharded)
    (sharded / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object, got list"):
        load_hf_folder(sharded)
    (sharded / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        load_hf_folder(sharded)


def test_one_name_in_two_files_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    rewrite(second, **{name: load_file(first)[name]})
    with pytest.raises(CheckpointError, match=f"{name} is both in {first.name} and {second.name}"):
        load_hf_folder(sharded)


def test_a_manifest_may_leave_out_defaults_but_not_differ(folder: Path) -> None:
    node = spec_of_folder(folder).model_dump(mode="json")
    attention = node["topology"]["layers"][0]["layers"][0]["layers"][1]
    attention["head_dim"] = None
    node["name"] = "other"
    load_hf_folder(folder, expected=ModelSpec.model_validate(node))
    attention["rope_base"] = 10000.0
    with pytest.raises(CheckpointError, match=r"another network.*block 0 has rope_base=500000.0, expected 10000.0"):
        load_hf_folder(folder, expected=ModelSpec.model_validate(node))
    node["topology"]["layers"][0]["repeat"] = 3
    with pytest.raises(CheckpointError, match="2 blocks, expected 3"):
        load_hf_folder(folder, expected=ModelSpec.model_validate(node))


def test_a_run_keeps_a_reference_that_notices_changes(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    labels = record_loaded(run, "student", folder)
    assert labels["student_weights"] == str(folder)
    assert record_loaded(run, "student", folder) == labels
    assert find_loaded_folder(run, "teacher") is None
    found = find_checkpoint(run, role="student")
    assert found == folder
    assert torch.equal(load_pretrained(found)[0].embedder.token.weight, load_hf_folder(folder).embedder.token.weight)
    rewrite(folder / "model.safetensors", **{Q: torch.zeros(4)})
    with pytest.raises(CheckpointError, match="that folder has changed since; start a new run"):
        find_checkpoint(run, role="student")
    with pytest.raises(CheckpointError, match="has changed since"):
        record_loaded(run, "student", folder)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(CheckpointError, match="no longer there; put the folder back"):
        find_checkpoint(run, role="student")


def test_streaming_equals_the_file_whatever_the_dtype(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(2100, 2001)  # more than one chunk of 8 MB, and a part of one
    weight = torch.randn(2001, 2100, generator=generator).to(torch.bfloat16)
    save_file({"weight": weight, "bias": torch.arange(2001.0)}, tmp_path / "a.safetensors")
    stream_into(module, index_tensors((tmp_path / "a.safetensors",)), where="a")
    assert torch.equal(module.weight, weight.float())
    assert torch.equal(module.bias, torch.arange(2001.0))


# VmHWM and not ru_maxrss, which a process inherits from the one that started it.


def test_load_hf_folder_refuses_an_untied_head_that_config_calls_tied(folder: Path) -> None:
    """A stored head of other values than the embedding was dropped without a word."""
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    equal = load_hf_folder(folder)
    assert torch.equal(equal.embedder.token.weight, tensors["model.embed_tokens.weight"].float())
    tensors["lm_head.weight"][3, 1] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight with different"):
        load_hf_folder(folder)


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_load_hf_folder_refuses_stored_frequencies_other_than_those_of_config(value: float, folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder / "model.safetensors", **{name: torch.full((4,), value)})
    with pytest.raises(CheckpointError, match=r"self_attn\.rotary_emb\.inv_freq holds"):
        load_hf_folder(folder)


@pytest.mark.parametrize("name", ["model.layers.0.attn.bias", "model.layers.0.attn.masked_bias"])
def test_load_hf_folder_refuses_tables_that_no_family_has(name: str, folder: Path) -> None:
    rewrite(folder / "model.safetensors", **{name: torch.ones(1)})
    with pytest.raises(CheckpointError, match=f"unexpected {re.escape(name)}"):
        load_hf_folder(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00009-of-00009.safetensors"])
def test_load_hf_folder_refuses_weights_that_its_index_does_not_name(name: str, sharded: Path) -> None:
    save_file({"model.norm.weight": torch.ones(32)}, sharded / name)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is not among the"):
        load_hf_folder(sharded)


def test_load_hf_folder_refuses_shards_without_their_index(folder: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is not among the"):
        load_hf_folder(folder)
