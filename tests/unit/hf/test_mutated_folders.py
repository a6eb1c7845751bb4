"""Mutated tensors of folders are used, equal to one used, or refused by name: a short run of faults/hf_folder.py."""

from __future__ import annotations

from pathlib import Path

from scripts.faults import hf_folder


def test_mutated_tensors_are_used_equal_or_refused() -> None:
    result = hf_folder.run(3, 150)
    assert (result["wrong"], result["mutants"]) == (0, 150), result["examples"]
    kinds = {
        "drop refused",
        "add refused",
        "perturb used",
        "not finite refused",
        "head refused",
        "tie refused",
    }
    assert (
        kinds | {"equal head used", "swap refused", "rename refused", "type used"} <= result["kinds"].keys()
    )


def test_a_tensor_that_is_passed_over_is_a_fault(tmp_path: Path) -> None:
    tensors = hf_folder.make(tmp_path / "made", "llama")
    hf_folder.write(tmp_path / "m", tensors, {**hf_folder.SHAPE, **hf_folder.FOLDERS["llama"]}, 3)
    assert hf_folder.load(tmp_path / "m", tensors) == ("used", "")
    assert (
        hf_folder.load(tmp_path / "m", tensors | {"x": tensors[hf_folder.HEAD]})[1]
        == "x is not what was read"
    )
    changed = tensors | {hf_folder.HEAD: tensors[hf_folder.HEAD] + 1}
    assert hf_folder.load(tmp_path / "m", changed)[1] == f"{hf_folder.HEAD} is not what was read"
