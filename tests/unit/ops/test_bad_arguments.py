"""Every op refuses arguments of a wrong kind or place by their names, before a kernel reads them as something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.absorbed_step import absorbed_queries
from caramba.ops.adamw import adamw_step
from caramba.ops.dba_append import dba_append, store_tokens
from caramba.ops.dba_decode import StoredStream, dba_decode
from caramba.ops.dba_decode_up import dba_decode_up
from caramba.ops.float8_cast import float8_swiglu, float8_swiglu_backward
from caramba.ops.foreach_norm import foreach_norm
from caramba.ops.formats import dequantize, quantize
from caramba.ops.latent_queries import latent_queries
from caramba.ops.layer_norm import add_layer_norm, layer_norm
from caramba.ops.linear_cross_entropy import cross_entropy_rows, linear_cross_entropy, scale_
from caramba.ops.lion import lion_step
from caramba.ops.norm_dropout_activation import norm_dropout_activation
from caramba.ops.prompt_lookup_step import prompt_lookup_step
from caramba.ops.rms_norm import add_rms_norm, rms_norm
from caramba.ops.rope import cos_sin, rope, rope_qkv
from caramba.ops.sample import sample
from caramba.ops.small_batch_linear import per_head_linear


def numbers(*shape: int, device: str = "cpu") -> Tensor:
    return torch.ones(shape, device=device)


def integers(*shape: int, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=torch.int64, device=device)


def wide(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=device)


X, TABLE = numbers(3, 4), numbers(1, 3, 2)
HEADS, STREAM, PLACES = numbers(2, 4, 3, 4), numbers(2, 1, 3, 4), torch.zeros(2, dtype=torch.int32)
CODES, SCALES = quantize(numbers(3, 64), "q8_0")
QUERIES, MAP = numbers(1, 3, 2, 4), numbers(2, 4, 4)
LIVE = torch.ones(1, dtype=torch.bool)
COUNT = torch.zeros(1, dtype=torch.int32)

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "rms weight of integers": (lambda: rms_norm(X, integers(4)), "rms_norm: weight is torch.int64"),
    "rms complex weight": (
        lambda: rms_norm(X, numbers(4).to(torch.complex64)),
        "rms_norm: weight is torch.complex64",
    ),
    "add rms": (lambda: add_rms_norm(X, X, integers(4)), "add_rms_norm: weight is torch.int64"),
    "layer norm bias": (lambda: layer_norm(X, None, integers(4)), "layer_norm: bias is torch.int64"),
    "add layer norm": (lambda: add_layer_norm(X, X, integers(4)), "add_layer_norm: weight is torch.int64"),
    "dropout bias": (
        lambda: norm_dropout_activation(X, None, integers(4), activation="relu"),
        "norm_dropout_activation: bias is torch.int64",
    ),
    "dropout seed": (
        lambda: norm_dropout_activation(X, activation="relu", p=0.5, seed=2**63),
        "norm_dropout_activation: seed=9223372036854775808, expected an integer of 64 bits",
    ),
    "dropout seed of no integer": (
        lambda: norm_dropout_activation(X, activation="relu", p=0.5, seed=1.5),  # pyright: ignore[reportArgumentType]
        "norm_dropout_activation: seed=1.5",
    ),
    "rope tables": (
        lambda: rope(HEADS, integers(1, 3, 2), integers(1, 3, 2)),
        "rope: cos is torch.int64",
    ),
    "rope dtype": (
        lambda: rope(HEADS, TABLE, TABLE, dtype=torch.int32),
        "rope: dtype is torch.int32, expected a floating one",
    ),
    "rope_qkv tables": (
        lambda: rope_qkv(numbers(2, 3, 16), integers(1, 3, 2), integers(1, 3, 2), 2, 1),
        "cos torch.int64",
    ),
    "rope_qkv heads": (
        lambda: rope_qkv(numbers(2, 3, 16), TABLE, TABLE, 4, 0),
        "for 4 and 0 heads; expected one head of each or more",
    ),
    "no class": (
        lambda: linear_cross_entropy(X, numbers(0, 4), integers(3) * -100),
        "V at least 1",
    ),
    "rows without a class": (
        lambda: cross_entropy_rows(numbers(3, 0), integers(3), numbers(3)),
        "expected one device and a class at least",
    ),
    "rows elsewhere": (
        lambda: cross_entropy_rows(numbers(3, 4), integers(3, device="meta"), numbers(3)),
        "targets on meta",
    ),
    "factor elsewhere": (lambda: scale_(numbers(3), numbers(1, device="meta")), "on meta; expected"),
    "factor of an integer": (lambda: scale_(numbers(3), integers(1)), "the factor torch.int64"),
    "norms of integers": (lambda: foreach_norm([integers(3)]), "foreach_norm: tensor 0 is torch.int64"),
    "lion parameter": (
        lambda: lion_step([integers(3)], [numbers(3)], [numbers(3)], lr=0.1),
        "lion_step: parameter 0 is torch.int64",
    ),
    "lion gradient": (
        lambda: lion_step([numbers(3)], [numbers(3)], [integers(3)], lr=0.1),
        "lion_step: gradient 0 is torch.int64",
    ),
    "adamw moment": (
        lambda: adamw_step([numbers(3)], [integers(3)], [numbers(3)], [torch.tensor(0.0)], [numbers(3)], lr=0.1),
        "adamw_step: first moment 0 is torch.int64",
    ),
    "scales elsewhere": (
        lambda: dequantize(CODES, SCALES.to("meta"), "q8_0", 64),
        "scales torch.float16 on meta",
    ),
    "numbers of integers": (
        lambda: dequantize(CODES, SCALES, "q8_0", 64, torch.int32),
        "dequantise: dtype is torch.int32",
    ),
    "append of a row": (
        lambda: dba_append([numbers(2, 3)], [numbers(2, 1, 8, 4)], PLACES),
        r"dba_append: streams: got torch.float32 \[2, 3\]",
    ),
    "append from elsewhere": (
        lambda: dba_append([STREAM, numbers(2, 1, 3, 2, device="meta")], [numbers(2, 1, 8, 6)], PLACES),
        "dba_append: streams: got .* on meta",
    ),
    "append to two lengths": (
        lambda: dba_append([STREAM, STREAM], [numbers(2, 1, 8, 4), numbers(2, 1, 6, 4)], PLACES),
        r"dba_append: buffers: got torch.float32 \[2, 1, 6, 4\] on cpu, expected floating \[2, 1, 8, W\]",
    ),
    "append by a sine elsewhere": (
        lambda: dba_append([STREAM], [numbers(2, 1, 8, 4)], PLACES, TABLE, numbers(1, 3, 2, device="meta"), 0),
        "dba_append: cos, sin: got .* on meta",
    ),
    "append by integers": (
        lambda: dba_append([STREAM], [numbers(2, 1, 8, 4)], PLACES, integers(1, 3, 2), integers(1, 3, 2), 0),
        "dba_append: cos, sin: got torch.int64",
    ),
    "append of what needs a gradient": (
        lambda: dba_append([numbers(2, 1, 3, 4).requires_grad_()], [numbers(2, 1, 8, 4)], PLACES),
        "dba_append: got inputs that require gradients",
    ),
    "tokens that need a gradient": (
        lambda: store_tokens([numbers(1, 1, 3, 4).requires_grad_()], [numbers(2, 1, 8, 4)], integers(3), integers(3)),
        "store_tokens: got inputs that require gradients",
    ),
    "values of integers": (
        lambda: per_head_linear(QUERIES, integers(2, 4, 3)),
        "per_head_linear: weight is torch.int64",
    ),
    "queries by integers": (
        lambda: latent_queries(QUERIES, integers(2, 4, 4), TABLE, TABLE, 1.0),
        "latent_queries: geo_map is torch.int64",
    ),
    "queries by two kinds of tables": (
        lambda: latent_queries(QUERIES, MAP, TABLE, TABLE.double(), 1.0),
        "latent_queries: cos is torch.float32 .* and sin torch.float64",
    ),
    "absorbed by integers": (
        lambda: absorbed_queries(QUERIES, integers(2, 4, 3), MAP, TABLE, TABLE, 1.0),
        "absorbed_queries: sem_map is torch.int64",
    ),
    "settings elsewhere": (
        lambda: sample(X, wide(3, device="meta"), wide(3)),
        r"temperature and uniform are torch.float64 \(3,\) on meta",
    ),
    "drafts elsewhere": (
        lambda: prompt_lookup_step(
            integers(1, 9), integers(1).int(), integers(1, 4), integers(1, 2, device="meta"), LIVE, 1, 1
        ),
        "prompt_lookup_step: sampled: got torch.int64 .* on meta",
    ),
    "a text of no row": (
        lambda: prompt_lookup_step(torch.tensor(3), integers(1).int(), integers(1, 4), integers(1, 2), LIVE, 1, 1),
        r"prompt_lookup_step: ids: got torch.int64 of shape \(\)",
    ),
    "float8 of integers": (
        lambda: float8_swiglu(integers(16, 32)),
        "float8_swiglu: packed is torch.int64",
    ),
    "float8 by other scales": (
        lambda: float8_swiglu_backward(numbers(16, 16), numbers(3, 1), numbers(16, 1), numbers(16, 32)),
        r"float8_swiglu: grad_scale and column_scale are \(3, 1\)",
    ),
    "angles of integers": (lambda: cos_sin(integers(3)), "cos_sin: angles are torch.int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused_by_its_name(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)


def decode(**changed: Any) -> tuple[Tensor, Tensor]:
    given = {
        "q_sem": numbers(2, 4, 1, 6),
        "q_geo": numbers(2, 4, 1, 4),
        "k_sem": StoredStream("fp32", numbers(2, 2, 8, 6)),
        "k_geo": StoredStream("fp32", numbers(2, 2, 8, 4)),
        "v": StoredStream("fp32", numbers(2, 2, 8, 5)),
        "seqlens": torch.full((2,), 5, dtype=torch.int32),
    }
    return dba_decode(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_geo": numbers(2, 4, 1, 4, device="meta")}, "q_geo: got .* on meta, expected .* on cpu"),
        ({"q_geo": numbers(2, 4, 1)}, "q_geo: got"),
        ({"k_sem": StoredStream("fp32", numbers(5))}, r"k_sem: got torch.float32 \[5\] .*, expected 4 axes"),
        ({"v": StoredStream("fp32", torch.tensor(1.0))}, r"v: got torch.float32 \[\] .*, expected 4 axes"),
        (
            {"null": tuple(numbers(2, width, device="meta") for width in (6, 4, 5))},
            "null: got .* on meta, .* on cpu",
        ),
        ({"window": 0}, "window: got 0, expected 1 or more, or None"),
        ({"q_sem": numbers(2, 4, 1, 6).requires_grad_()}, "dba_decode: got inputs that require gradients"),
        (
            {"null": tuple(numbers(2, width).requires_grad_() for width in (6, 4, 5))},
            "dba_decode: got inputs that require gradients",
        ),
    ],
)
def test_decode_attention_refuses_by_name(changed: dict[str, Any], message: str) -> None:
    decode()
    with pytest.raises(ConfigError, match=message):
        decode(**changed)


def test_a_window_of_nothing_is_refused_where_values_are_mapped_too() -> None:
    c, k_geo = StoredStream("fp32", numbers(1, 1, 8, 6)), StoredStream("fp32", numbers(1, 1, 8, 4))
    lengths = torch.full((1,), 5, dtype=torch.int32)
    given = (numbers(1, 2, 1, 6), numbers(1, 2, 1, 4), c, k_geo, numbers(2, 6, 3), lengths)
    assert dba_decode_up(*given, window=1).shape == (1, 1, 2, 3)
    with pytest.raises(ConfigError, match="dba_decode_up: window: got 0"):
        dba_decode_up(*given, window=0)


def test_queries_that_need_gradients_are_read_where_none_are_kept() -> None:
    with torch.no_grad():
        out, _ = decode(q_sem=numbers(2, 4, 1, 6).requires_grad_())
    assert torch.equal(out, decode()[0])
