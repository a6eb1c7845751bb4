"""500 mutations of the tensors of folders: every stored tensor is used, equal to one used, or refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from folders import write
from safetensors.torch import load_file, save_file

from caramba.data.checkpoint.hf_names import hf_names
from caramba.errors import CheckpointError
from caramba.model import load_hf_folder

COUNT = 125
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def mutate(tensors: dict[str, torch.Tensor], rng: random.Random) -> tuple[str, str]:
    """Drop, add or perturb one tensor; return what was done, and to which."""
    name = rng.choice(sorted(tensors))
    action = rng.choice(("drop", "add", "perturb", "not finite", "head", "equal head"))
    if action == "drop":
        del tensors[name]
    elif action == "add":
        name = (
            f"{name.removesuffix('.weight')}{rng.choice(('.bias', '.extra', '2.weight', '.lora_A.weight'))}"
        )
        if name in tensors:
            return "none", name
        tensors[name] = torch.randn(tensors[rng.choice(sorted(tensors))].shape)
    elif action in ("perturb", "not finite"):
        flat = tensors[name].view(-1)
        place = rng.randrange(flat.numel())
        flat[place] = flat[place] + 1.0 if action == "perturb" else rng.choice((float("nan"), float("inf")))
    else:
        name = HEAD
        tensors[HEAD] = tensors[EMBEDDING].clone()
        if action == "head":
            tensors[HEAD][3, 1] += 0.5
    return action, name


@pytest.mark.parametrize("case", ["llama31_gqa", "llama32_tied", "qwen2", "qwen3"])
def test_mutated_tensors_are_used_equal_or_refused(case: str, tmp_path: Path) -> None:
    write(tmp_path / "m", case)
    file = tmp_path / "m" / "model.safetensors"
    intact = load_file(file)
    is_tied = json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"]
    rng = random.Random(case)
    seen: set[tuple[str, bool]] = set()
    for _ in range(COUNT):
        tensors = {name: tensor.clone() for name, tensor in intact.items()}
        action, name = mutate(tensors, rng)
        save_file(tensors, file, metadata={"format": "pt"})
        refusal = None
        try:
            model = load_hf_folder(tmp_path / "m")
        except CheckpointError as error:
            refusal = str(error)
        seen.add((action, refusal is None))
        if refusal is not None:
            assert name in refusal, f"{action} {name}: {refusal}"
            assert action in ("drop", "add", "not finite", "head"), f"{action} {name}: {refusal}"
            continue
        assert action != "not finite"
        stored_names = hf_names(model.spec)
        state = model.state_dict()
        used = {stored_names[own]: tensor for own, tensor in state.items() if own in stored_names}
        for stored, tensor in tensors.items():
            found = used[EMBEDDING if is_tied and stored == HEAD else stored]
            assert torch.equal(found, tensor.float()), f"{action} {name}: {stored} is not what was read"
    assert {("drop", False), ("add", False), ("perturb", True), ("not finite", False)} <= seen
