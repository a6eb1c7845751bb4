"""Deterministic algorithms on and off, and random states that follow from seed and rank."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from caramba.errors import ConfigError
from caramba.runtime import apply_determinism, random_states, restore_random_states, seed_process


@pytest.fixture(autouse=True)
def _as_before():
    yield
    apply_determinism(False)


def test_an_operation_without_a_deterministic_algorithm_raises_only_when_asked(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    apply_determinism(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    unpool = torch.nn.MaxUnpool1d(2)
    values, places = torch.nn.MaxPool1d(2, return_indices=True)(torch.arange(4.0).view(1, 1, 4))
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        unpool(values, places)
    apply_determinism(False)
    assert unpool(values, places).tolist() == [[[0.0, 1.0, 0.0, 3.0]]]


def test_a_workspace_that_does_not_repeat_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0 .* unset it"):
        apply_determinism(True)


def test_every_generator_follows_from_seed_and_rank():
    def drawn(seed: int, rank: int) -> tuple[float, float, float]:
        seed_process(seed, rank)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert drawn(7, 0) == drawn(7, 0)
    assert drawn(7, 1) == drawn(7, 1)
    ours = [drawn(seed, rank) for seed in (7, 8) for rank in (0, 1, 2)]
    assert len({value for draw in ours for value in draw}) == 18
    seed_process(7)
    first = torch.rand(())
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(())), "rank 0 draws what the seed itself gives"


def test_a_random_state_is_put_back_on_fewer_gpus(monkeypatch):
    put: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put.append((state, str(device))))
    torch.manual_seed(5)
    states = random_states(torch.device("cpu"))
    assert list(states) == ["cpu"]
    drawn = torch.rand(())
    every = [f"of GPU {index}" for index in range(8)]  # as older runs saved them
    for device in ("cpu", "cuda:1"):
        restore_random_states({**states, "cuda": every}, torch.device(device))
        assert torch.equal(torch.rand(()), drawn)
    restore_random_states({**states, "cuda": every[:1]}, torch.device("cuda:1"))
    restore_random_states({**states, "cuda": "own"}, torch.device("cuda:0"))
    restore_random_states(states, torch.device("cuda:0"))
    assert put == [("of GPU 1", "cuda:1"), ("own", "cuda:0")]


class _Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.utils.data.get_worker_info().id, torch.rand(()), random.random()


def test_loader_workers_draw_apart_and_again():
    def drawn():
        seed_process(3)
        rows = torch.utils.data.DataLoader(_Draws(), num_workers=2)
        return sorted(tuple(float(item) for item in row) for row in rows)

    first = drawn()
    assert [row[0] for row in first] == [0.0, 1.0]
    assert first[0][1:] != first[1][1:]
    assert drawn() == first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_on_the_gpu_gives_the_same_bits():
    apply_determinism(True)

    def gradients() -> torch.Tensor:
        seed_process(1)
        table = torch.nn.Embedding(16, 32, device="cuda")
        tokens = torch.randint(16, (8, 512), device="cuda")
        torch.nn.functional.scaled_dot_product_attention(
            *[table(tokens).unsqueeze(1).bfloat16()] * 3
        ).float().sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad

    assert torch.equal(gradients(), gradients())
