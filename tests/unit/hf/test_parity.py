"""Logits of every supported family against transformers, and the names and shapes of what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from folders import CASES, V, write

from caramba.config.estimate import model_cost
from caramba.config.hf import FAMILIES, spec_of_folder
from caramba.data.checkpoint import index_tensors, weight_files
from caramba.data.checkpoint.hf_names import hf_names
from caramba.model import load_hf_folder

TOKENS = torch.randint(3, V, (2, 40), generator=torch.Generator().manual_seed(0))


def assert_logits_equal(folder: Path, theirs: torch.nn.Module) -> None:
    ours = load_hf_folder(folder)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(ours(TOKENS), expected, rtol=0, atol=1e-4)
        # Right-padded, as transformers is given it: what stands before the padding does not see it.
        padded, mask = TOKENS.clone(), torch.ones_like(TOKENS)
        padded[1, 23:], mask[1, 23:] = 0, 0
        expected = theirs(padded, attention_mask=mask).logits
        actual = ours(padded)
        torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(actual[1, :23], expected[1, :23], rtol=0, atol=1e-4)
    assert expected.std() > 0.5  # logits that say something


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    theirs = write(tmp_path, name)
    assert_logits_equal(tmp_path, theirs)
    spec = spec_of_folder(tmp_path)
    assert set(hf_names(spec).values()) == set(index_tensors(weight_files(tmp_path)))
    assert set(hf_names(spec)) == {key for key in load_hf_folder(tmp_path).state_dict() if not key.endswith("inv_freq")}
    assert model_cost(spec).params == sum(parameter.numel() for parameter in theirs.parameters())


def test_every_family_is_among_the_cases() -> None:
    assert {family.lower() for family, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize(("name", "dtype"), [("llama31_gqa", torch.bfloat16), ("qwen2", torch.float16)])
def test_sharded_half_precision(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    theirs = write(tmp_path, name, shard="8KB", dtype=dtype)
    assert len(weight_files(tmp_path)) > 2
    assert_logits_equal(tmp_path, theirs)
    kept = load_hf_folder(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in kept.parameters()} == {dtype}
    assert torch.equal(kept.embedder.token.weight, theirs.get_input_embeddings().weight.to(dtype))


def test_cached_decode_past_the_original_context(tmp_path: Path) -> None:
    theirs = write(tmp_path, "mistral_window")
    ours = load_hf_folder(tmp_path)
    ctx = ours.new_context(2, 40)
    with torch.no_grad():
        chunks = [ours(part, ctx) for part in TOKENS.split([17, 1, 1, 21], dim=1)]
        torch.testing.assert_close(torch.cat(chunks, 1), theirs(TOKENS).logits, rtol=0, atol=1e-4)


def test_config_of_transformers_4(tmp_path: Path) -> None:
    theirs = write(tmp_path, "llama31_gqa")
    new = spec_of_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert spec_of_folder(tmp_path) == new
    assert_logits_equal(tmp_path, theirs)
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert spec_of_folder(tmp_path) == new


def test_a_copy_of_a_tied_head_and_equal_frequencies_are_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = write(tmp_path, "llama32_tied")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": theirs.model.rotary_emb.inv_freq.half(),
    }
    save_file(tensors | extra, file)
    assert_logits_equal(tmp_path, theirs)
    save_file({"lm_head.weight": tensors.pop("model.embed_tokens.weight"), **tensors}, file)
    assert_logits_equal(tmp_path, theirs)
