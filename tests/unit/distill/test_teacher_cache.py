"""Teacher outputs on disk: one forward per sample over epochs and runs, exact, damaged files made again, a cap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from caramba.distill import (
    BlockwiseObjective,
    TeacherCache,
    TeacherLogitsObjective,
    refuse_over_cap,
)
from caramba.errors import ConfigError
from caramba.model import Model, build_model, model_hash
from caramba.surgery import pair_attention
from tests.unit.surgery.test_weight_svd import TOKENS, spec, student_spec


class Counted:
    """Counts the sequences that a model's topology sees."""

    def __init__(self, model: Model) -> None:
        self.sequences = 0
        model.topology.register_forward_pre_hook(self._count)

    def _count(self, _module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.sequences += len(inputs[0])


def batch(*rows: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = TOKENS[list(rows)]
    return tokens[:, :-1], tokens[:, 1:], torch.tensor(rows)


def backward(loss: Tensor) -> None:
    loss.backward()


@pytest.mark.parametrize("kind", ["blockwise", "drift", "logits"])
def test_the_teacher_runs_once_per_sample_over_epochs_and_runs(kind: str, tmp_path: Path) -> None:
    assert len(TOKENS) >= 3

    def objective(cache: TeacherCache | None) -> tuple[BlockwiseObjective | TeacherLogitsObjective, Counted]:
        teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
        student = build_model(student_spec(4, 8, 8), seed=2)
        counted = Counted(teacher)
        if kind == "logits":
            return TeacherLogitsObjective(student, teacher, cache=cache, top_k=40), counted
        pairs = pair_attention(teacher, student)
        return BlockwiseObjective(student, teacher, pairs, cache=cache, on_student=kind == "drift"), counted

    def cache() -> TeacherCache:
        return TeacherCache({"teacher": "t", "outputs": kind}, tmp_path)

    cached, counted = objective(cache())
    plain, _ = objective(None)
    for rows, expected in (((0, 1), 2), ((1, 2), 3), ((2, 0), 3)):
        ours, theirs = cached.step(batch(*rows), backward), plain.step(batch(*rows), backward)
        assert counted.sequences == expected, "only what is not stored yet"
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for mine, reference in zip(cached.model.parameters(), plain.model.parameters(), strict=True):
        if reference.grad is not None:
            torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-6)
    again, counted = objective(cache())
    again.step(batch(0, 1, 2), backward)
    assert counted.sequences == 0, "another run reads what this one stored"
    again.evaluate(batch(0, 1)[:2])
    assert counted.sequences == 2, "held-out batches are never cached"


def test_a_damaged_file_is_reported_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = TeacherCache({"a": 1}, tmp_path)
    made: list[list[int]] = []

    def compute(rows: Tensor) -> dict[str, Tensor]:
        made.append(rows.tolist())
        return {"o": rows.float()[:, None] * torch.ones(5)}

    index = torch.tensor([7, 9])
    first = cache.fetch(index, index.device, compute)
    (file,) = tmp_path.glob("*/*/9.targets")
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:-9] + b"\x00" + whole[-8:], b""):
        file.write_bytes(broken)
        assert torch.equal(cache.fetch(index, index.device, compute)["o"], first["o"])
        assert made[-1] == [1], "only the damaged sample"
        assert "not whole teacher outputs; making them again" in "".join(capsys.readouterr())
        assert file.read_bytes() == whole
    assert not list(tmp_path.rglob("*.part"))


def test_other_keys_are_other_folders(tmp_path: Path) -> None:
    hashes = [model_hash(build_model(spec(), seed=seed)) for seed in (1, 1, 2)]
    hashes.append(model_hash(build_model(spec(), seed=1).to(torch.bfloat16)))
    # Equal weights under another rotary base give other outputs.
    hashes.append(model_hash(build_model(spec(rope_base=500.0), seed=1)))
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4
    assert len({TeacherCache({"teacher": "a", "k": k}, tmp_path).folder for k in (1, 2, 1)}) == 2


def test_an_estimate_over_the_cap_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refuse_over_cap("blockwise", 1000, 1_000_000, max_gb=1.0)
    assert "1,000 samples take 1.00 GB on disk" in "".join(capsys.readouterr())
    with pytest.raises(ConfigError, match=r"global: teacher outputs of 1,001 .* over teacher_cache_max_gb=1; raise"):
        refuse_over_cap("global", 1001, 1_000_000, max_gb=1.0)


def test_logits_of_16_bits_are_stored_under_autocast_of_a_cpu(tmp_path: Path) -> None:
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    cache = TeacherCache({"teacher": "t"}, tmp_path)
    objective = TeacherLogitsObjective(
        build_model(student_spec(4, 8, 8), seed=2), teacher, cache=cache, top_k=8, half=True
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = (objective.step(batch(0, 1), backward) for _ in range(2))  # stored, then read
    torch.testing.assert_close(first, second)
