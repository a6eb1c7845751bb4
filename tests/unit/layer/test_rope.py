"""RoPE: a complex float64 reference, the scalings' formulas, offsets, and frequencies that survive casts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from caramba.config.layer_base import RopeScalingConfig
from caramba.errors import ConfigError
from caramba.layer import RotaryEmbedding, rope_frequencies, rotate
from caramba.layer.rope import angles_of, apply_rope_halves, share_frequencies, share_rope_tables
from caramba.ops import backend
from caramba.ops.backend import upcast

LLAMA3 = RopeScalingConfig(type="llama3", factor=32.0, original_max_position_embeddings=8192)


def reference_frequencies(width: int, base: float, scaling: RopeScalingConfig | None) -> torch.Tensor:
    """The published formulas, pair by pair, in Python floats."""
    out = []
    for pair in range(width // 2):
        frequency = base ** (-2 * pair / width)
        if scaling is not None and scaling.type == "linear":
            frequency /= scaling.factor
        elif scaling is not None:
            length, low, high = (
                scaling.original_max_position_embeddings,
                scaling.low_freq_factor,
                scaling.high_freq_factor,
            )
            wavelength = 2 * math.pi / frequency
            if wavelength > length / low:
                frequency /= scaling.factor
            elif wavelength >= length / high:
                smooth = (length / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        out.append(frequency)
    return torch.tensor(out, dtype=torch.float64)


def reference_rotate(x: torch.Tensor, frequencies: torch.Tensor, offset: int) -> torch.Tensor:
    """Multiply each pair, as a complex number, by exp(i position frequency)."""
    first, second = x.double().chunk(2, dim=-1)
    positions = torch.arange(offset, offset + x.shape[-2], dtype=torch.float64)
    turned = torch.complex(first, second) * torch.polar(torch.tensor(1.0).double(), positions[:, None] * frequencies)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("scaling", [None, RopeScalingConfig(type="linear", factor=4.0), LLAMA3])
@pytest.mark.parametrize(("width", "base"), [(64, 500000.0), (6, 10000.0)])
def test_frequencies_follow_the_formulas(width: int, base: float, scaling: RopeScalingConfig | None) -> None:
    expected = reference_frequencies(width, base, scaling)
    torch.testing.assert_close(rope_frequencies(width, base, scaling).double(), expected, rtol=1e-6, atol=0)


def test_llama3_has_all_three_bands_and_linear_differs() -> None:
    ratio = rope_frequencies(64, 500000.0, LLAMA3) / rope_frequencies(64, 500000.0)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(1 / 32)
    assert ((ratio > 1 / 32 + 1e-3) & (ratio < 1 - 1e-3)).any()


YARN = [
    RopeScalingConfig(type="yarn", factor=4.0, original_max_position_embeddings=2048),
    RopeScalingConfig(type="yarn", factor=40.0, original_max_position_embeddings=4096, beta_fast=16.0),
    RopeScalingConfig(
        type="yarn", factor=8.0, original_max_position_embeddings=64, beta_slow=2.0, attention_factor=1.25
    ),
]
SHAPES = [(64, 500000.0), (128, 10000.0), (8, 10000.0)]


@pytest.mark.parametrize("scaling", YARN)
@pytest.mark.parametrize(("width", "base"), SHAPES)
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(width: int, base: float, scaling: RopeScalingConfig) -> None:
    plain, got = rope_frequencies(width, base), rope_frequencies(width, base, scaling)
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    # The ramp runs between whole pairs, so that one pair at each end may stand on it.
    fast, slow = (
        turns >= scaling.beta_fast * base ** (2 / width),
        turns <= scaling.beta_slow * base ** (-2 / width),
    )
    assert torch.equal(got[fast], plain[fast])
    torch.testing.assert_close(got[slow], plain[slow] / scaling.factor)
    assert ((got <= plain) & (got >= plain / scaling.factor * (1 - 1e-6))).all()
    assert (got.diff() < 0).all()
    rope = RotaryEmbedding(width, base, scaling)
    cos, sin = rope(5, 3, torch.device("cpu"))
    expected = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, expected))


def transformers_rope(kind: str, width: int, base: float, scaling: RopeScalingConfig, length: int) -> Any:
    """Frequencies and factor of transformers' own initialisation functions."""
    utils = pytest.importorskip(
        "transformers.modeling_rope_utils", reason="compares with transformers, which is not installed"
    )
    llama = pytest.importorskip("transformers").LlamaConfig
    original = scaling.original_max_position_embeddings
    parameters = {
        "rope_type": kind,
        "rope_theta": base,
        "factor": scaling.factor,
        "original_max_position_embeddings": original,
    }
    if kind == "yarn":
        parameters |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        parameters["attention_factor"] = scaling.attention_factor
    most = original if kind == "dynamic" else int(original * scaling.factor)
    config = llama(
        hidden_size=2 * width,
        num_attention_heads=2,
        head_dim=width,
        max_position_embeddings=most,
        rope_theta=base,
        rope_scaling=parameters,
    )
    return utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("scaling", YARN)
@pytest.mark.parametrize(("width", "base"), SHAPES)
def test_yarn_equals_transformers(width: int, base: float, scaling: RopeScalingConfig) -> None:
    expected, factor = transformers_rope("yarn", width, base, scaling, 1)
    torch.testing.assert_close(rope_frequencies(width, base, scaling), expected, rtol=1e-6, atol=0)
    assert RotaryEmbedding(width, base, scaling).attention_factor == pytest.approx(factor)


DYNAMIC = RopeScalingConfig(type="dynamic", factor=2.0, original_max_position_embeddings=32)


@pytest.mark.parametrize("length", [32, 33, 80])
@pytest.mark.parametrize(("width", "base"), SHAPES)
def test_dynamic_equals_transformers(width: int, base: float, length: int) -> None:
    expected, factor = transformers_rope("dynamic", width, base, DYNAMIC, length)
    assert factor == 1.0
    cos, sin = RotaryEmbedding(width, base, DYNAMIC)(0, length, torch.device("cpu"))
    angles = torch.arange(length).float()[:, None] * expected
    torch.testing.assert_close(cos[0], angles.cos(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin[0], angles.sin(), rtol=1e-4, atol=1e-4)


def test_dynamic_is_plain_up_to_the_original_length_and_refuses_a_cache_beyond_it() -> None:
    rope, plain, cpu = RotaryEmbedding(8, 10000.0, DYNAMIC), RotaryEmbedding(8, 10000.0), torch.device("cpu")
    for offset, n_tokens in ((0, 32), (5, 27), (31, 1)):
        assert torch.equal(rope(offset, n_tokens, cpu)[0], plain(offset, n_tokens, cpu)[0])
    assert not torch.equal(rope(0, 33, cpu)[0], plain(0, 33, cpu)[0])
    with pytest.raises(ConfigError, match=r"1 tokens after 32 cached reach 33, beyond .*embeddings=32.*yarn"):
        rope(32, 1, cpu)
    one_pair = RotaryEmbedding(2, 10000.0, DYNAMIC)(0, 50, cpu)[0]
    assert torch.equal(one_pair, RotaryEmbedding(2, 10000.0)(0, 50, cpu)[0])


@pytest.mark.parametrize("offset", [0, 7, 300])
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_rotation_equals_complex_multiplication(offset: int, scaling: RopeScalingConfig | None) -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = RotaryEmbedding(8, 10000.0, scaling)(offset, 5, x.device)
    expected = reference_rotate(x, reference_frequencies(8, 10000.0, scaling), offset)
    torch.testing.assert_close(rotate(x, cos, sin).double(), expected, rtol=1e-4, atol=1e-4)


def test_scores_depend_on_distance_alone() -> None:
    rope = RotaryEmbedding(8, 10000.0)
    q, k = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    scores = [
        rotate(q, *rope(offset, 6, q.device)) @ rotate(k, *rope(offset, 6, q.device)).transpose(-1, -2)
        for offset in (0, 50)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_groups_have_frequencies_of_their_own() -> None:
    rope = RotaryEmbedding(4, 10000.0, n_groups=2, explicit=True)
    rope.inv_freq[1] = torch.tensor([0.5, 0.25])
    x = torch.randn(1, 2, 4, 4)
    turned = rotate(x, *rope(3, 4, x.device))
    for group in range(2):
        expected = reference_rotate(x[:, group], rope.inv_freq[group].double(), 3)
        torch.testing.assert_close(turned[:, group].double(), expected, rtol=1e-5, atol=1e-5)


def test_frequencies_stay_float32_and_are_never_lost() -> None:
    explicit, computed = RotaryEmbedding(8, 10000.0, n_groups=2, explicit=True), RotaryEmbedding(8, 10000.0)
    assert set(explicit.state_dict()) == {"inv_freq"}
    assert set(computed.state_dict()) == set()
    explicit.inv_freq[0, 0] = 0.123456789
    chosen = explicit.inv_freq.clone()
    for rope, expected in ((explicit, chosen), (computed, rope_frequencies(8, 10000.0)[None])):
        for cast in (torch.bfloat16, torch.float64, torch.float32):
            rope.to(cast)
            assert rope.inv_freq.dtype == torch.float32
            assert torch.equal(rope.inv_freq, expected)
        rope.to_empty(device="cpu")
        assert torch.equal(rope.inv_freq, expected)
    with torch.device("meta"):
        built = RotaryEmbedding(8, 10000.0)
    assert torch.equal(built.to_empty(device="cpu").inv_freq, rope_frequencies(8, 10000.0)[None])


def test_half_precision_features_rotate_in_float32() -> None:
    x = torch.randn(1, 1, 4, 8)
    cos, sin = RotaryEmbedding(8, 10000.0).to(torch.bfloat16)(1000, 4, x.device)
    assert cos.dtype == sin.dtype == rotate(x.bfloat16(), cos, sin).dtype == torch.float32


def test_a_compiled_rotation_reads_tables_where_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend._attached, ("rope", "cpu"), "reference")
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    embedding = RotaryEmbedding(6, 10000.0, n_groups=2)

    def rotation(x: torch.Tensor, offset: int) -> torch.Tensor:
        return rotate(x, *embedding(offset, x.shape[2], x.device))

    compiled = torch.compile(rotation, backend=keep, fullgraph=True, dynamic=False)
    for n_tokens in (64, 8):
        x = torch.randn(1, 2, n_tokens, 6)
        torch.testing.assert_close(compiled(x, 3), rotation(x, 3))
    calls = [[node for node in graph.graph.nodes if "cos_sin" in str(node.target)] for graph in graphs]
    assert [len(found) for found in calls] == [1, 0], "few tokens are not worth a launch"
    torch.library.opcheck(
        torch.ops.caramba.cos_sin.default, (torch.randn(3),), test_utils=("test_schema", "test_faketensor")
    )


def test_angles_of_several_layers_at_once_are_those_of_each() -> None:
    ropes = [RotaryEmbedding(8, base, None, n_groups=2, explicit=True) for base in (10.0, 50.0, 1e4)]
    offset = torch.tensor([[3, 4], [9, 10]], dtype=torch.int32)
    found = angles_of(ropes, offset)
    for rope in ropes:
        assert all(map(torch.equal, found[rope], rope(offset, 2, offset.device)))
    # Of layers that share a key each step has one table, and unequal ones do not stand side by side.
    assert share_frequencies(ropes)
    assert not share_frequencies([RotaryEmbedding(8, 10.0)])
    assert not share_frequencies([])
    assert not share_frequencies([*ropes, RotaryEmbedding(4, 10.0, explicit=True)])
    own = RotaryEmbedding(8, 10.0, n_groups=2, explicit=True)
    own.__class__ = type("OfOneHead", (RotaryEmbedding,), {})  # its forward may give a part of the heads
    assert not share_frequencies([*ropes, own])
    # As a compiled step looks them up.
    made = torch.compile(lambda: angles_of(ropes, offset)[ropes[1]], backend="eager", fullgraph=True)()
    assert all(map(torch.equal, made, found[ropes[1]]))


@torch.no_grad()
def test_a_step_turns_by_the_table_to_the_last_bit() -> None:
    module = torch.nn.ModuleList(RotaryEmbedding(8, 10000.0, YARN[0]) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    share_rope_tables(module, 40, torch.device("cpu"), for_steps=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for offset, n_tokens in ((0, 3), (5, 1), (6, 1), (39, 1), (39, 2)):  # the last is beyond the table
            x = torch.randn(2, 3, n_tokens, 8, generator=generator).to(dtype)
            for rope in module:
                halves = rope.cached_cos_sin(offset, n_tokens, x.device)
                assert (halves is None) == (offset + n_tokens > 40)
                if halves is not None:
                    found = apply_rope_halves(upcast(x).unflatten(-1, (2, -1)), *halves).flatten(-2)
                    assert torch.equal(found, rotate(x, *rope(offset, n_tokens, x.device)))
