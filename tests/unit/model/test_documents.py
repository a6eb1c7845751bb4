"""Packed rows equal their documents run alone: in values, in gradients, compiled and under checkpointing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_specs import VOCAB, attention, block, spec, transformer
from random_specs import deep_specs
from test_properties import lively, quick
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from caramba.config.layer_base import RopeScalingConfig
from caramba.config.model import ModelSpec
from caramba.errors import ConfigError
from caramba.layer import Documents, RotaryEmbedding
from caramba.layer.score import VarlenKernel, varlen_attention

N_TOKENS = 12


def rows_of(cuts: list[list[int]]) -> tuple[Tensor, Tensor, list[tuple[int, slice]]]:
    """Tokens and ids of rows cut at `cuts`, and the place of every document."""
    tokens = torch.randint(VOCAB, (len(cuts), N_TOKENS), generator=torch.Generator().manual_seed(1))
    ids = torch.zeros_like(tokens)
    places = []
    for row, inner in enumerate(cuts):
        for number, (start, end) in enumerate(pairwise([0, *inner, N_TOKENS])):
            ids[row, start:end] = number % 2  # ids come back: only neighbours count
            places.append((row, slice(start, end)))
    return tokens, ids, places


ROWS = st.lists(st.lists(st.integers(1, N_TOKENS - 1), unique=True, max_size=5).map(sorted), min_size=2, max_size=2)


@quick(15)
@given(model_spec=deep_specs(), cuts=ROWS)
def test_a_packed_row_is_its_documents_alone(model_spec: ModelSpec, cuts: list[list[int]]) -> None:
    model = lively(model_spec).double().eval()
    tokens, ids, places = rows_of(cuts)
    with torch.no_grad():
        together = model(tokens, documents=ids)
        for row, place in places:
            alone = model(tokens[row : row + 1, place])
            torch.testing.assert_close(together[row : row + 1, place], alone, rtol=1e-9, atol=1e-11)


def test_gradients_compile_and_checkpointing_agree() -> None:
    layers = [block("decoupled_gate"), attention("window")]
    model = lively(spec(*layers, max_positions=N_TOKENS)).double()
    tokens, ids, places = rows_of([[5], [3, 4]])

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients(sum(model(tokens[r : r + 1, p]).square().sum() for r, p in places))  # type: ignore[arg-type]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    apart = Documents.of(ids)
    hidden = model.embedder(tokens, apart.positions)
    for node in model.topology.layers:
        hidden = checkpoint(node, hidden, apart, use_reentrant=False)

    def refuses(*args: Tensor, **words: object) -> Tensor:
        raise AssertionError("a graph keeps the mask")

    with varlen_attention(VarlenKernel(refuses, frozenset({"window_size"}), "cpu", (torch.float64,))):
        graph = compiled(tokens, documents=ids)
    for found in (model(tokens, documents=ids), graph, model.logits(hidden)):
        for ours, theirs in zip(gradients(found.square().sum()), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_one_document_is_no_document() -> None:
    model, (tokens, ids, _) = lively(transformer("decoupled")), rows_of([[], []])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, documents=ids), model(tokens), rtol=1e-5, atol=1e-5)


def test_documents_are_refused_where_they_have_no_meaning() -> None:
    model, (tokens, ids, _) = lively(transformer("standard")), rows_of([[2], []])
    with pytest.raises(ConfigError, match=r"documents have shape \(2, 3\), tokens \(2, 12\)"):
        model(tokens, documents=ids[:, :3])
    with pytest.raises(ConfigError, match="a cache holds one document per row"):
        model(tokens, model.new_context(2, N_TOKENS), ids)
    with pytest.raises(ConfigError, match="expected integers"):
        Documents.of(ids.float())
    scaling = RopeScalingConfig(type="dynamic", factor=2.0, original_max_position_embeddings=8)
    rope = RotaryEmbedding(4, 100.0, scaling)
    with pytest.raises(ConfigError, match="rows of 12 tokens of packed documents exceed"):
        rope(Documents.of(ids).positions, 12, ids.device)
