"""Each tensor of a mutated Hugging Face folder is used, equal to one used, or refused by name.

Tiny folders of Llama, Mistral, Qwen 2 and Qwen 3, in one file and in shards. Tensors are dropped, added, perturbed,
swapped, renamed, reshaped or tied, or have values that are not finite.
"""

from __future__ import annotations

import collections
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.examples import examples

from caramba.config.hf import spec_of_folder
from caramba.data.checkpoint.hf_names import hf_names
from caramba.errors import CarambaError
from caramba.model import build_model, load_hf_folder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPE: dict[str, Any] = {
    **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "hidden_act": "silu"},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False},
}  # fmt: skip
FOLDERS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama_tied": {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        **{"tie_word_embeddings": True},
    },
    "mistral": {
        **{"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        **{"sliding_window": None},
    },
    "qwen2": {
        **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
        **{"tie_word_embeddings": True},
    },
    "qwen3": {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False},
        **{"head_dim": 8, "attention_bias": False},
    },
}
ACTIONS = (
    *("drop", "add", "perturb", "swap", "not finite", "head", "equal head", "tie", "untie", "rename", "reshape"),
    *("reverse", "type"),
)  # fmt: skip
SUFFIXES = (".bias", ".extra", "2.weight", ".lora_A.weight", ".weight_scale", ".base_layer.weight")
Tensors = dict[str, torch.Tensor]


def make(folder: Path, family: str) -> Tensors:
    """Write the config.json of a tiny model of `family`; return its random tensors by their stored names."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, **FOLDERS[family]}))
    spec = spec_of_folder(folder)
    torch.manual_seed(0)
    state, names = build_model(spec).state_dict(), hf_names(spec)
    stored = {names[name]: torch.randn_like(value) for name, value in state.items() if name in names}
    if spec.head.tied:
        stored.pop(HEAD, None)
    return stored


def mutate(tensors: Tensors, config: dict[str, Any], chance: random.Random) -> tuple[str, list[str]]:
    """Change one tensor, or how config.json ties the head; return what was done, and the names of what changed."""
    action, names = chance.choice(ACTIONS), sorted(tensors)
    name = chance.choice(names)
    if action == "drop":
        del tensors[name]
    elif action == "rename":
        new = chance.choice((f"x{name}", name.upper(), name.replace("model.", "", 1), f"{name} "))
        tensors[new] = tensors.pop(name)
        return action, [name, new]
    elif action == "add":
        name = f"{name.removesuffix('.weight')}{chance.choice(SUFFIXES)}"
        tensors.setdefault(name, torch.randn(tensors[chance.choice(names)].shape))
    elif action == "perturb":
        flat = tensors[name].view(-1)
        flat[chance.randrange(flat.numel())] += chance.choice((1.0, 1e-3))
    elif action == "not finite":
        flat = tensors[name].view(-1)
        flat[chance.randrange(flat.numel())] = chance.choice((float("nan"), float("inf"), -float("inf")))
    elif action == "swap":
        other = chance.choice(names)
        tensors[name], tensors[other] = tensors[other], tensors[name]
        return action, [name, other]
    elif action == "reshape":
        tensors[name] = chance.choice((lambda x: x[:-1], lambda x: x.unsqueeze(0), lambda x: x.reshape(-1)[:0]))(
            tensors[name]
        ).contiguous()
    elif action == "reverse":
        tensors[name] = tensors[name].flip(0).contiguous()
    elif action == "type":
        tensors[name] = tensors[name].to(chance.choice((torch.bfloat16, torch.float16, torch.float64, torch.int32)))
    else:
        if action in ("head", "equal head"):
            tensors[HEAD] = tensors[EMBEDDING].clone()
        if action == "head":
            tensors[HEAD][3, 1] += 0.5
        if action in ("tie", "untie"):
            config["tie_word_embeddings"] = action == "tie"
        return action, [HEAD, EMBEDDING]
    return action, [name]


def write(folder: Path, tensors: Tensors, config: dict[str, Any], n_files: int) -> None:
    """Write a Hugging Face folder of one file, or of several with their index."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if n_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    parts = {f"model-{i + 1:05}-of-{n_files:05}.safetensors": names[i::n_files] for i in range(n_files)}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load(folder: Path, tensors: Tensors) -> tuple[str, str]:
    """Load a folder; return whether it was used or refused, and which tensor was passed over or the refusal."""
    try:
        model = load_hf_folder(folder)
    except CarambaError as error:
        reason = str(error) if error.exit_status == 2 else f"exit status {error.exit_status}: {error}"
        return "refused", reason
    names = hf_names(model.spec)
    used = {names[own]: value for own, value in model.state_dict().items() if own in names}
    for name, value in tensors.items():
        found = used.get(EMBEDDING if model.spec.head.tied and name == HEAD else name)
        if found is None or not torch.equal(found, value.to(found.dtype)):
            return "used", f"{name} is not what was read"
        if not torch.isfinite(found).all():
            return "used", f"{name} is not finite"
    return "used", ""


def check_mutant(made: dict[str, Tensors], folder: Path, chance: random.Random) -> tuple[str, str]:
    """Mutate and load one folder; return what was done and became of it, and its fault, empty for none."""
    family = chance.choice(sorted(FOLDERS))
    tensors = {name: value.clone() for name, value in made[family].items()}
    config = {**SHAPE, **FOLDERS[family]}
    action, names = mutate(tensors, config, chance)
    write(folder, tensors, config, chance.choice((1, 1, 3)))
    outcome, reason = load(folder, tensors)
    fault = reason if outcome == "used" else ""
    if outcome == "refused" and (not any(name in reason for name in names) or len(reason) > 2000):
        fault = f"the refusal names none of {names}: {reason[:300]}"
    elif outcome == "refused" and action in ("perturb", "reverse", "equal head"):
        fault = f"refused: {reason[:300]}"
    return f"{action} {outcome}", f"{family} {action}: {fault}" if fault else ""


def test_mutated_tensors_are_used_equal_or_refused(tmp_path: Path) -> None:
    made = {family: make(tmp_path / family, family) for family in FOLDERS}
    for family, tensors in made.items():
        write(tmp_path / "mutant", tensors, {**SHAPE, **FOLDERS[family]}, 1)
        assert load(tmp_path / "mutant", tensors) == ("used", ""), family
    kinds: collections.Counter[str] = collections.Counter()
    for index in range(examples(450)):
        kind, fault = check_mutant(made, tmp_path / "mutant", random.Random(f"3:{index}"))
        kinds[kind] += 1
        assert not fault, f"case {index}: {fault}"
    for action in ("drop", "add", "not finite", "head", "tie", "swap", "rename"):
        assert kinds[f"{action} refused"], action
    for action in ("perturb", "equal head", "type"):
        assert kinds[f"{action} used"], action


def test_a_tensor_that_is_passed_over_is_a_fault(tmp_path: Path) -> None:
    tensors = make(tmp_path / "made", "llama")
    write(tmp_path / "m", tensors, {**SHAPE, **FOLDERS["llama"]}, 3)
    assert load(tmp_path / "m", tensors) == ("used", "")
    assert load(tmp_path / "m", tensors | {"x": tensors[HEAD]})[1] == "x is not what was read"
    changed = tensors | {HEAD: tensors[HEAD] + 1}
    assert load(tmp_path / "m", changed)[1] == f"{HEAD} is not what was read"
