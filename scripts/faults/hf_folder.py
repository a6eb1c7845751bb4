"""Mutate the tensors of Hugging Face folders: each stored tensor is used, equal to one used, or refused by name.

`python scripts/faults/hf_folder.py --seed 1 --count 500 --jobs 2` writes tiny folders of Llama, Mistral, Qwen 2 and
Qwen 3, in one file and in shards, and drops, adds, perturbs, swaps, renames, reshapes or ties tensors, or makes values
not finite. It prints a JSON result and exits 1 where a tensor was passed over or a refusal does not name
it.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from caramba.config.hf import spec_of_folder
from caramba.data.checkpoint.hf_names import hf_names
from caramba.errors import CarambaError
from caramba.model import build_model, load_hf_folder

sys.path.insert(0, str(Path(__file__).parent))

from case_pool import Run, outcomes, parser, tally
from case_pool import main as report

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
        tensors[name] = chance.choice(
            (lambda x: x[:-1], lambda x: x.unsqueeze(0), lambda x: x.reshape(-1)[:0])
        )(tensors[name]).contiguous()
    elif action == "reverse":
        tensors[name] = tensors[name].flip(0).contiguous()
    elif action == "type":
        tensors[name] = tensors[name].to(
            chance.choice((torch.bfloat16, torch.float16, torch.float64, torch.int32))
        )
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
        return "refused", str(
            error
        ) if error.exit_status == 2 else f"exit status {error.exit_status}: {error}"
    names = hf_names(model.spec)
    used = {names[own]: value for own, value in model.state_dict().items() if own in names}
    for name, value in tensors.items():
        found = used.get(EMBEDDING if model.spec.head.tied and name == HEAD else name)
        if found is None or not torch.equal(found, value.to(found.dtype)):
            return "used", f"{name} is not what was read"
        if not torch.isfinite(found).all():
            return "used", f"{name} is not finite"
    return "used", ""


def run(seed: int, count: int, jobs: int = 1, seconds: float | None = None) -> dict[str, Any]:
    """Load `count` mutated folders; return counts by what was done and what went wrong."""

    def prepare(folder: Path) -> Run:
        made = {family: make(folder / family, family) for family in FOLDERS}
        for family, tensors in made.items():
            write(folder / "mutant", tensors, {**SHAPE, **FOLDERS[family]}, 1)
            if (found := load(folder / "mutant", tensors)) != ("used", ""):
                raise RuntimeError(f"{family} does not load before it is mutated: {found}")

        def case(index: int) -> dict[str, Any]:
            chance = random.Random(f"{seed}:{index}")
            family = chance.choice(sorted(FOLDERS))
            tensors = {name: value.clone() for name, value in made[family].items()}
            config = {**SHAPE, **FOLDERS[family]}
            action, names = mutate(tensors, config, chance)
            write(folder / "mutant", tensors, config, chance.choice((1, 1, 3)))
            outcome, reason = load(folder / "mutant", tensors)
            fault = ""
            if outcome == "used":
                fault = reason
            elif not any(name in reason for name in names) or len(reason) > 2000:
                fault = f"the refusal names none of {names}: {reason[:300]}"
            elif action in ("perturb", "reverse", "equal head"):
                fault = f"refused: {reason[:300]}"
            return {"kind": f"{action} {outcome}", "fault": f"{family} {action}: {fault}" if fault else ""}

        return case

    kinds, wrong = tally(outcomes(prepare, 0, count, jobs, seconds=seconds))
    return {"seed": seed, "mutants": kinds.total(), "kinds": dict(sorted(kinds.items())), **wrong}


def main() -> int:
    words = parser(__doc__, count=500, cases="mutated folders").parse_args()
    torch.set_num_threads(1)
    return report(words, lambda: run(words.seed, words.count, words.jobs, words.seconds), "wrong")


if __name__ == "__main__":
    raise SystemExit(main())
