from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from caramba.checkpoint import load_tensors
from caramba.checkpoint.formats import read_model_tensors
from caramba.cli import main
from caramba.config.kvcache import KVCacheKind
from caramba.cost import model_cost
from caramba.data import train_bpe
from caramba.errors import ConfigError
from caramba.export.write import check_out
from caramba.infer import greedy, open_model
from caramba.model import load_pretrained
from tests.integration.export.samples import (
    DBA,
    FIRST,
    GQA,
    LATENT,
    LLAMA3,
    MLP,
    NORM,
    VOCAB,
    M,
    block,
    loud,
    make_run,
    spec,
    transformer,
)

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-4

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


def exported(tmp_path: Path, run: Path, *words: str, name: str = "out") -> Path:
    folder = tmp_path / name
    assert main(["export", str(run), "--out", str(folder), *words]) == 0
    return folder


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))


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


REMOTE = {
    "dba": transformer(DBA),
    # One latent wider than a head, one narrower: both forms of the layer, in prefill and in decode.
    "latent": spec(
        *block(LATENT),
        *block({**LATENT, "sem_dim": 6, "null_attn": True, "decoupled_gate": True, "bias": True}),
    ),
    "first tokens": spec(*block(FIRST), *block({**FIRST, "sem_dim": 6, "bias": True})),
    "gates": transformer(
        {**DBA, "decoupled_gate": True, "decoupled_gate_dynamic": True, "qk_norm": True}, tied=False
    ),
    "every topology": spec(
        {"type": "CyclicTopology", "n_cycles": 2, "layers": block(DBA)},
        {"type": "RecurrentTopology", "steps": 2, "layers": block({**GQA, "learned_temperature": True})},
        {
            "type": "SequentialTopology",
            "layers": [
                {"type": "ParallelTopology", "layers": [MLP, {**GQA, "local_window": 5}]},
                {"type": "LinearLayer", "d_in": M, "d_out": M, "reduce": "mean"},
                {"type": "BranchingTopology", "layers": [NORM, {"type": "LayerNormLayer", "d_model": M}]},
                {"type": "LinearLayer", "d_in": 2 * M, "d_out": M},
                {"type": "DropoutLayer", "p": 0.5},
            ],
        },
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What one process without caramba makes of the folders of all of them."""
    place = tmp_path_factory.mktemp("alone")
    folders = {}
    for index, (name, model) in enumerate(
        REMOTE.items()
    ):  # transformers knows modules by their folder's name
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
        assert (
            first == 2 * 2 * 3 * 2 * (8 + 8) * 4
        )  # two sequences, two layers, three tokens of two heads' k and v
    assert result["allocated"] == 46 * per_token + first
    assert result["text"].tolist() == list(b"the <eos> cat")
    assert set(result["angles"]) <= {torch.float32}
    assert result["grad"].abs().sum() > 0
    assert result["half"] == {"torch.bfloat16", "torch.float32"}


def test_the_cache_holds_what_dba_stores_and_no_more(tmp_path):
    model = loud(REMOTE["dba"])
    elements = sum(DBA[key] for key in ("sem_dim", "geo_dim", "v_dim"))
    assert model.new_context(1, 1, static=True).bytes_per_token == 2 * 4 * elements  # two layers of fp32


def padded(prompts: list[torch.Tensor], fill: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [T_i] padded on the left to one length, with their mask."""
    width = max(map(len, prompts))
    rows = [torch.cat((torch.full((width - len(row),), fill), row)) for row in prompts]
    mask = [(torch.arange(width) >= width - len(row)).long() for row in prompts]
    return torch.stack(rows), torch.stack(mask)


@pytest.mark.parametrize("name", ["dba", "first tokens"])
def test_prompts_padded_on_the_left_are_scored_and_continued_as_each_alone(tmp_path, name):
    """Greedy, beams, with and without a cache; two of the prompts are equally long and share one."""
    model = loud(REMOTE[name])
    folder = exported(tmp_path, make_run(tmp_path, model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    prompts = [tokens()[0, :length] for length in (5, 12)] + [tokens()[1, :5], tokens()[1, :1]]
    batch, mask = padded(prompts)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        logits = theirs(batch, attention_mask=mask).logits
        plain = theirs(batch, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits, plain, atol=TOLERANCE, rtol=0)
        for row, prompt in zip(logits, prompts, strict=True):
            expected = model(prompt[None])[0]
            torch.testing.assert_close(row[-len(prompt) :], expected, atol=TOLERANCE, rtol=0)
        done = theirs.generate(batch, attention_mask=mask, return_dict_in_generate=True, **options)
        uncached = theirs.generate(batch, attention_mask=mask, use_cache=False, **options)
        beams = theirs.generate(batch, attention_mask=mask, num_beams=3, **options)
        for at, prompt in enumerate(prompts):
            alone = greedy(model, prompt[None], 8)[0, -8:]
            assert torch.equal(done.sequences[at, -8:], alone)
            assert torch.equal(uncached[at, -8:], alone)
            assert torch.equal(beams[at, -8:], theirs.generate(prompt[None], num_beams=3, **options)[0, -8:])
    stored = sum(len(prompt) + 7 for prompt in prompts)  # padding is not cached, nor the last new token
    per_token = model.new_context(1, 1, static=True).bytes_per_token
    first = len(prompts) * model_cost(model.spec).first_bytes(KVCacheKind.FP32)
    assert done.past_key_values.used_bytes() == stored * per_token + first
    labels = batch.masked_fill(mask == 0, -100)
    loss = theirs.train()(batch, attention_mask=mask, labels=labels).loss
    each = [F.cross_entropy(model(row[None])[0, :-1], row[1:], reduction="sum") for row in prompts]
    torch.testing.assert_close(loss, sum(each) / sum(len(row) - 1 for row in prompts), atol=1e-5, rtol=0)


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


def test_a_generation_goes_on_from_the_cache_of_an_earlier_one(tmp_path):
    model = loud(REMOTE["dba"])
    folder = exported(tmp_path, make_run(tmp_path, model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    batch, mask = padded([tokens()[0, :6], tokens()[1, :11]])
    first = theirs.generate(
        batch, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True, **options
    )
    mask = torch.cat((mask, mask.new_ones(2, 5)), dim=1)
    past = first.past_key_values
    after = theirs.generate(
        first.sequences, attention_mask=mask, past_key_values=past, max_new_tokens=30, **options
    )
    for row, prompt in zip(after, (tokens()[0, :6], tokens()[1, :11]), strict=True):
        assert torch.equal(row[-35:], greedy(model, prompt[None], 35)[0, -35:])
    per_token = model.new_context(1, 1, static=True).bytes_per_token
    assert past.allocated_bytes() == per_token * (40 + 45)  # all but the last new token, and nothing spare
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache, which stores other tensors"):
        theirs(batch, past_key_values=transformers.DynamicCache())
    full = theirs(tokens(), use_cache=False).logits
    for kept, places in ((torch.tensor([3, 7]), [3, 7]), (2, [38, 39]), (0, range(40))):
        some = theirs(tokens(), use_cache=False, logits_to_keep=kept).logits
        torch.testing.assert_close(some, full[:, list(places)], atol=1e-5, rtol=0)


def test_padding_that_tokens_would_see_is_refused(tmp_path):
    folder = exported(tmp_path, make_run(tmp_path, loud(REMOTE["dba"])))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    hole, left = torch.ones(2, 40, dtype=torch.long), torch.ones(2, 40, dtype=torch.long)
    hole[0, 3:5], left[0, :3] = 0, 0
    places = torch.arange(40).expand(2, 40)
    with torch.no_grad():
        for mask, text in (
            (hole, "pad prompts on the left"),
            (left.flip(1), "pad prompts on the left"),
            (0 * left, "padding alone"),
        ):
            with pytest.raises(ValueError, match=text):
                theirs(tokens(), attention_mask=mask)
        with pytest.raises(ValueError, match="position_ids are"):
            theirs(tokens(), attention_mask=left, position_ids=places)
        with pytest.raises(ValueError, match=r"attention_mask is \[2, 39\]"):
            theirs(tokens(), attention_mask=left[:, 1:])
        past = theirs(tokens()).past_key_values
        with pytest.raises(ValueError, match="differs from that of the cached"):
            theirs(tokens()[:, :1], attention_mask=torch.cat((left, left[:, -1:]), 1), past_key_values=past)
        right = theirs(tokens(), attention_mask=left.flip(1), use_cache=False).logits
        torch.testing.assert_close(right, theirs(tokens(), use_cache=False).logits)
    with pytest.raises(ValueError, match="cache_implementation"):
        theirs.generate(tokens(), max_new_tokens=2, cache_implementation="static")


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
        torch.testing.assert_close(
            load_pretrained(folder)[0](tokens()), model(tokens()), atol=TOLERANCE, rtol=0
        )
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    new = half.generate(tokens(), max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert new.shape == (2, 43)


def test_a_folder_that_was_exported_is_opened_with_its_tokenizer(tmp_path):
    model = loud(REMOTE["every topology"])
    folder = exported(tmp_path, make_run(tmp_path, model, block_size=48))
    opened = open_model(str(folder))
    assert opened.model.spec == model.spec
    assert opened.labels == {"proxy": "untrained"}
    assert opened.max_positions == 48
    assert opened.tokenizer.encode("the cat") == list(b"the cat")
    with torch.no_grad():
        torch.testing.assert_close(opened.model(tokens()), model(tokens()))
    again = tmp_path / "again"
    assert main(["export", str(folder), "--out", str(again)]) == 0
    assert (
        load_tensors(again / "model.safetensors").keys() == load_tensors(folder / "model.safetensors").keys()
    )
    assert main(["export", str(folder), "--format", "safetensors", "--out", str(tmp_path / "own")]) == 0
    bare = open_model(str(tmp_path / "own"), tokenizer="byte")
    assert bare.tokenizer.vocab_size == 257


def test_a_run_s_checkpoint_file_is_opened_with_the_run_s_tokenizer(tmp_path):
    run = make_run(tmp_path, loud(transformer(GQA)), block_size=48)
    opened = open_model(str(run / "checkpoints" / "pretrain.safetensors"))
    assert (opened.run_dir, opened.max_positions) == (run, 48)
    assert opened.tokenizer is not None
    assert opened.tokenizer.encode("cat") == [99, 97, 116]
    # elsewhere the same file says nothing of its text
    alone = tmp_path / "alone" / "checkpoints" / "pretrain.safetensors"
    alone.parent.mkdir(parents=True)
    shutil.copyfile(run / "checkpoints" / "pretrain.safetensors", alone)
    assert open_model(str(alone)).tokenizer is None


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


@pytest.mark.parametrize("name", ["model.safetensors", "model.ckpt", ""])
def test_own_formats_take_a_dtype_and_refuse_what_it_cannot_hold(tmp_path, capsys, name):
    model = loud(REMOTE["dba"])
    run = make_run(tmp_path, model)
    format = {"model.safetensors": "safetensors", "model.ckpt": "ckpt", "": "dcp"}[name]
    folder = exported(tmp_path, run, "--format", format, "--dtype", "bf16")
    found = read_model_tensors(folder / name)
    assert {found[key].dtype for key, _ in model.named_parameters()} == {torch.bfloat16}
    back, _ = load_pretrained(folder / name)
    for key, tensor in model.named_parameters():
        assert torch.equal(back.state_dict()[key], tensor.bfloat16().float()), key
    for key, tensor in model.named_buffers():  # RoPE's frequencies are not rounded
        assert torch.equal(back.state_dict()[key], tensor), key
    with torch.no_grad():
        model.embedder.token.weight[3, 2] = 1e6
    run = make_run(tmp_path, model)
    words = ["export", str(run), "--format", format, "--dtype", "fp16", "--out", str(tmp_path / "x")]
    assert main(words) == 2
    assert "embedder.token.weight holds 1e+06, and the largest number of float16" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("format", "name"), [("safetensors", "model.safetensors"), ("ckpt", "model.ckpt"), ("dcp", "")]
)
def test_own_formats_come_back_bit_for_bit(tmp_path, format, name):
    model = loud(REMOTE["gates"])
    run = make_run(tmp_path, model)
    folder = exported(tmp_path, run, "--format", format)
    back, labels = load_pretrained(folder / name)
    assert labels == {"proxy": "untrained"}
    assert back.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    again = tmp_path / "again"
    if name:
        assert main(["export", str(folder / name), "--format", "safetensors", "--out", str(again)]) == 0


def test_a_folder_index_that_could_run_code_is_refused(tmp_path, capsys):
    import pickle

    from caramba.errors import CheckpointError

    folder = exported(tmp_path, make_run(tmp_path, loud(REMOTE["dba"])), "--format", "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match="could run code"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--format", "hff", "--out", "x"], "did you mean 'hf'"),
        (["--format", "hf"], "--out"),
        (["--out", "full"], "not empty"),
        (["--out", "x", "--dtype", "b16"], "did you mean 'bf16'"),
        (["--out", "x", "--which", "nobody"], "invalid choice"),
        (["--out", "x", "--which", "teacher"], "has no teacher"),
        (["--out", "x", "--colour"], "unrecognized arguments"),
    ],
)
def test_mistakes_exit_2_and_write_nothing(tmp_path, monkeypatch, capsys, words, text):
    run = make_run(tmp_path, loud(REMOTE["dba"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    assert main(["export", str(run), *words]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_an_unknown_run_is_named_and_force_replaces(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path, loud(REMOTE["dba"]))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "smaple", "--out", "x"]) == 2
    assert "sample" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    folder = exported(tmp_path, run, "--force")
    assert (folder / "mine.txt").read_text() == "mine"
    assert (folder / "config.json").is_file()


def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written \(.*\); name a folder where you may write"):
        check_out(tmp_path / "file" / "out", force=False)
    check_out(tmp_path / "new" / "out", force=False)
    assert list((tmp_path / "new").iterdir()) == []
