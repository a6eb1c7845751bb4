"""Folders for transformers: stock architectures where there is one, and code that runs without caramba elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from caramba.config.estimate import model_cost
from caramba.config.kvcache import KVCacheKind
from caramba.data import train_bpe
from caramba.infer import greedy
from caramba.model import load_pretrained
from tests.integration.export.samples import (
    DBA,
    GQA,
    LLAMA3,
    MLP,
    NORM,
    REMOTE,
    TOLERANCE,
    M,
    block,
    exported,
    loud,
    make_run,
    spec,
    tokens,
    transformer,
)

transformers = pytest.importorskip("transformers")

# Runs where caramba cannot be imported: what a folder needs, it has.
ALONE = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("caramba", "pydantic"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
def read(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokens = torch.load("tokens.pt")
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        new = model.generate(tokens, max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0)
        cached = model(tokens, use_cache=True)
        again = model(tokens[:, :1], past_key_values=cached.past_key_values).logits
    text = AutoTokenizer.from_pretrained(folder)("the <eos> cat").input_ids
    beams = model.generate(tokens[:1], max_new_tokens=4, num_beams=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    result = {"logits": logits, "new": new, "again": again, "beams": beams, "text": torch.tensor(text)}
    result["angles"] = [model.to(torch.bfloat16).state_dict()[n].dtype for n in model.state_dict() if "inv_freq" in n]
    if type(model).__name__ == "CarambaForCausalLM":
        cache = cached.past_key_values
        result["used"] = cache.used_bytes()
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        torch.manual_seed(0)
        done = model.generate(tokens, max_new_tokens=7, do_sample=False, return_dict_in_generate=True, eos_token_id=None)
        result["allocated"] = done.past_key_values.allocated_bytes()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        result["grad"] = model.get_input_embeddings().weight.grad
        half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
        result["half"] = {str(p.dtype) for n, p in half.named_parameters()} | {
            str(b.dtype) for n, b in half.named_buffers()}
    return result
torch.save({folder: read(folder) for folder in sys.argv[1:]}, "results.pt")
"""


@pytest.mark.parametrize(
    ("attention", "tied"),
    [
        (GQA, True),
        ({**GQA, "rope_scaling": LLAMA3, "rope_base": 500000.0, "head_dim": 12, "bias": True}, False),
        (
            {
                "type": "AttentionLayer",
                "d_model": M,
                "n_heads": 2,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            True,
        ),
        (
            {
                **GQA,
                "rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 46},
            },
            True,
        ),
        (
            {**GQA, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            True,
        ),
        (
            {
                **GQA,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 3.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 8.0,
                    "attention_factor": 1.5,
                },
            },
            True,
        ),
    ],
)
def test_plain_llama_is_a_stock_llama(tmp_path, attention, tied):
    model = loud(transformer(attention, tied))
    folder = exported(tmp_path, make_run(tmp_path, model))
    assert not list(folder.glob("*.py"))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["caramba"]["labels"] == {"proxy": "untrained"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens()).logits, model(tokens()), atol=TOLERANCE, rtol=0)
        new = theirs.generate(tokens(), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(new, greedy(model, tokens(), 6))
    back, _ = load_pretrained(folder)
    torch.testing.assert_close(back(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("mlp_bias", "head_dim", "architecture"),
    [(False, 8, "Qwen2ForCausalLM"), (False, 12, "Qwen2ForCausalLM"), (True, 8, "CarambaForCausalLM")],
)
def test_biases_on_q_k_and_v_alone_are_those_of_a_qwen_2(tmp_path, mlp_bias, head_dim, architecture):
    layers = block({**GQA, "bias": "qkv", "head_dim": head_dim})
    layers[1]["layers"] = [NORM, {**MLP, "bias": mlp_bias}]
    model = loud(spec({"type": "NestedTopology", "repeat": 2, "layers": layers}))
    folder = exported(tmp_path, make_run(tmp_path, model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(theirs).__name__ == architecture
    again, _ = load_pretrained(folder)
    with torch.no_grad():
        expected = model(tokens())
        torch.testing.assert_close(theirs(tokens()).logits, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(again(tokens()), expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What one process without caramba makes of the folders of all of them."""
    place = tmp_path_factory.mktemp("alone")
    folders = {}
    for index, (name, model) in enumerate(REMOTE.items()):  # transformers knows modules by their folder's name
        part = place / str(index)
        part.mkdir()
        folders[name] = exported(part, make_run(part, loud(model)), name=f"out{index}")
        files = {file.name for file in folders[name].iterdir()}
        assert {"modeling_caramba.py", "configuration_caramba.py"} <= files
    torch.save(tokens(), place / "tokens.pt")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *(str(folder) for folder in folders.values())],
        capture_output=True,
        text=True,
        cwd=place,
        env={
            "PATH": "/usr/bin:/bin",
            "HF_HOME": str(place / "hf"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    results = torch.load(place / "results.pt", weights_only=False)
    return {name: results[str(folder)] for name, folder in folders.items()}


@pytest.mark.parametrize("name", REMOTE)
def test_any_other_topology_runs_without_caramba(alone, name):
    model, result = loud(REMOTE[name]), alone[name]
    with torch.no_grad():
        ours = model(tokens())
        torch.testing.assert_close(result["logits"], ours, atol=TOLERANCE, rtol=0)
        longer = model(torch.cat((tokens(), tokens()[:, :1]), dim=1))[:, -1:]
    torch.testing.assert_close(result["again"], longer, atol=TOLERANCE, rtol=0)
    assert torch.equal(result["new"], greedy(model, tokens(), 7))
    assert result["beams"].shape == (1, 44)
    # 41 tokens are cached after 40 and one more; generate caches all but the last of its 47, in exactly that room.
    per_token = 2 * model.new_context(1, 1, static=True).bytes_per_token
    first = 2 * model_cost(model.spec).first_bytes(KVCacheKind.FP32)
    assert result["used"] == 41 * per_token + first
    if name == "latent":
        assert per_token == 2 * 4 * ((12 + 4) + (6 + 4))  # two sequences of fp32: c and k_geo of both layers
    if name == "first tokens":
        assert first == 2 * 2 * 3 * 2 * (8 + 8) * 4  # two sequences, two layers, three tokens of two heads' k and v
    assert result["allocated"] == 46 * per_token + first
    assert result["text"].tolist() == list(b"the <eos> cat")
    assert set(result["angles"]) <= {torch.float32}
    assert result["grad"].abs().sum() > 0
    assert result["half"] == {"torch.bfloat16", "torch.float32"}


def test_the_cache_holds_what_dba_stores_and_no_more(tmp_path):
    model = loud(REMOTE["dba"])
    elements = sum(DBA[key] for key in ("sem_dim", "geo_dim", "v_dim"))
    assert model.new_context(1, 1, static=True).bytes_per_token == 2 * 4 * elements  # two layers of fp32


@pytest.mark.parametrize("name", ["dba", "llama"])
@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_folders_hold_what_they_say(tmp_path, name, word, dtype):
    model = loud(transformer(GQA) if name == "llama" else REMOTE[name])
    folder = exported(tmp_path, make_run(tmp_path, model), "--dtype", word)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(dtype).removeprefix("torch.")
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {key: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
    assert {kind for key, kind in found.items() if not key.endswith("inv_freq")} == {dtype}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert theirs.dtype == dtype
    with torch.no_grad():  # buffers, RoPE's frequencies, are not rounded
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    with torch.no_grad():
        whole = theirs.float()(tokens(), use_cache=False).logits
        torch.testing.assert_close(whole, model(tokens()), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(load_pretrained(folder)[0](tokens()), model(tokens()), atol=TOLERANCE, rtol=0)
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    new = half.generate(tokens(), max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert new.shape == (2, 43)


def test_a_bpe_tokenizer_gives_the_same_ids_and_text(tmp_path):
    tokenizer = train_bpe(["the cat sat on the mat, the dog ran"] * 20, 270)
    wide = transformer(GQA).model_dump(mode="json")
    wide["embedder"]["vocab_size"] = tokenizer.vocab_size
    model = loud(type(REMOTE["dba"]).model_validate(wide))
    folder = exported(tmp_path, make_run(tmp_path, model, tokenizer=tokenizer))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the cat  sat\n", "<eos> naïve 🦀", " x"):
        ids = theirs(text).input_ids
        assert ids == tokenizer.encode(text)
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.eos_id
