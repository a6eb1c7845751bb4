"""Layers: the widths and weights that follow from their fields, and the rules between fields."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from caramba.config.cost import AttentionWork, Width, WidthError
from caramba.config.extension import parse_node
from caramba.config.kvcache import KVCacheKind
from caramba.config.layer import AttentionLayerConfig, LinearLayerConfig
from caramba.config.layer_base import RopeScalingConfig


def attention(**fields):
    return AttentionLayerConfig.model_validate({"d_model": 64, "n_heads": 4, **fields})


def count(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


class TestAttentionWeights:
    def test_standard_is_four_square_matrices(self):
        cost = attention().infer(Width(64))
        assert cost.params == cost.matmul_params_used == 4 * 64 * 64

    def test_gqa_shrinks_keys_and_values(self):
        shapes = attention(mode="gqa", n_kv_heads=2).parameter_shapes()
        assert shapes == {
            "q.weight": (64, 64),
            "k.weight": (32, 64),
            "v.weight": (32, 64),
            "out.weight": (64, 64),
        }

    def test_head_dim_detaches_the_heads_from_the_width(self):
        assert attention(head_dim=8).parameter_shapes()["out.weight"] == (64, 32)

    def test_bottleneck_uses_attn_dim_throughout(self):
        cost = attention(mode="bottleneck", attn_dim=16).infer(Width(64))
        assert cost.params == 4 * 16 * 64
        assert cost.kv_elements_per_token == 32

    def test_bias_adds_one_vector_per_projection_and_no_matrix_work(self):
        plain, biased = attention(), attention(bias=True)
        assert biased.infer(Width(64)).params - plain.infer(Width(64)).params == 4 * 64
        assert biased.infer(Width(64)).matmul_params_used == plain.infer(Width(64)).matmul_params_used

    def test_decoupled_per_head_honours_key_value_heads(self):
        config = attention(mode="decoupled", n_kv_heads=2, sem_dim=8, geo_dim=16, v_dim=32)
        assert config.parameter_shapes() == {
            "q_sem.weight": (16, 64),
            "q_geo.weight": (32, 64),
            "k_sem.weight": (8, 64),
            "k_geo.weight": (16, 64),
            "v.weight": (32, 64),
            "out.weight": (64, 64),
        }
        assert config.dims().cached == config.infer(Width(64)).kv_elements_per_token == 8 + 16 + 32

    def test_gate_temperature_and_norms_add_their_vectors(self):
        config = attention(
            mode="decoupled",
            sem_dim=8,
            geo_dim=16,
            v_dim=64,
            decoupled_gate=True,
            decoupled_gate_dynamic=True,
            learned_temperature=True,
            qk_norm=True,
        )
        plain = attention(mode="decoupled", sem_dim=8, geo_dim=16, v_dim=64)
        extra = count(config.parameter_shapes()) - count(plain.parameter_shapes())
        assert extra == 4 + 4 * 64 + 4 + 2 * (2 + 4)
        assert config.infer(Width(64)).matmul_params_used == plain.infer(Width(64)).matmul_params_used + 4 * 64

    def test_qk_norm_of_standard_attention_is_two_head_wide_scales(self):
        assert attention(qk_norm=True).infer(Width(64)).params == 4 * 64 * 64 + 2 * 16

    def test_tied_semantic_keys_have_no_weight_but_are_cached(self):
        tied = attention(mode="decoupled", sem_dim=8, geo_dim=16, v_dim=64, tie_qk=True)
        assert "k_sem.weight" not in tied.parameter_shapes()
        assert tied.dims().streams[0] == ("k_sem", 4, 2)

    def test_latent_maps_and_its_two_biases(self):
        config = attention(mode="decoupled", layout="latent", n_kv_heads=2, head_dim=16, sem_dim=12, geo_dim=6)
        shapes = config.parameter_shapes()
        assert shapes["q.weight"] == (64, 64)
        assert shapes["c.weight"] == (12, 64)
        assert shapes["k_geo.weight"] == (6, 64)
        assert shapes["q_sem_map"] == (4, 16, 12)
        assert shapes["q_geo_map"] == (4, 16, 6)
        assert shapes["v_up"] == (4, 12, 16)
        assert shapes["out.weight"] == (64, 64)
        assert {name for name in shapes if name.endswith("bias")} == {"c.bias", "out.bias"}
        work = config.infer(Width(64))
        assert work.kv == ((("c", 1, 12), ("k_geo", 1, 6)),)
        # The latent is narrower than a head, so every forward is absorbed.
        assert work.attention == (AttentionWork(4 * (18 + 12)),)

    def test_a_latent_wider_than_a_head_trains_on_keys_of_every_head(self):
        config = attention(mode="decoupled", layout="latent", head_dim=16, sem_dim=40, geo_dim=8)
        cost = config.infer(Width(64))
        assert cost.attention == (AttentionWork(4 * (48 + 40), forward_width=4 * (24 + 16)),)
        # Five causal positions see three keys on average.
        assert cost.flops_per_token(5) == 2 * cost.matmul_params_used + 2 * 3 * 160
        assert cost.decode_flops_per_token(5) == 2 * cost.matmul_params_used + 2 * 3 * 352

    def test_a_null_latent_is_one_row_for_all_heads(self):
        shapes = attention(mode="decoupled", layout="latent", sem_dim=12, geo_dim=6, null_attn=True)
        assert shapes.parameter_shapes()["null_c"] == (12,)
        assert shapes.parameter_shapes()["null_geo"] == (6,)


class TestAttentionRules:
    DECOUPLED = {"mode": "decoupled", "sem_dim": 8, "geo_dim": 16, "v_dim": 64}

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"n_heads": 5}, "n_heads=5 does not divide d_model=64; use a divisor of 64, or set head_dim"),
            ({"mode": "gqa", "n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=4; use a divisor of 4"),
            ({"n_kv_heads": 2}, "use mode=gqa"),
            (
                {"mode": "decopled"},
                "expected one of standard gqa decoupled bottleneck; did you mean 'decoupled'?",
            ),
            ({"head_dim": 7}, "rotary positions need an even width per head, got 7"),
            ({**DECOUPLED, "geo_dim": 12}, "even width per head, got 3; set geo_dim to 8 or 16"),
            (
                {**DECOUPLED, "v_dim": None, "layout": "latent", "geo_dim": 1},
                "even width per head, got 1; set geo_dim to 2",
            ),
            ({"sem_dim": 8}, "sem_dim belongs to mode=decoupled, got mode=standard"),
            ({"attn_dim": 8}, "attn_dim belongs to mode=bottleneck"),
            ({"mode": "bottleneck"}, "mode=bottleneck needs attn_dim"),
            ({"mode": "decoupled", "sem_dim": 8}, "mode=decoupled needs sem_dim and geo_dim"),
            ({**DECOUPLED, "sem_dim": 6}, "sem_dim=6 is not a multiple of the 4 key/value heads"),
            (
                {**DECOUPLED, "decoupled_gate_dynamic": True},
                "decoupled_gate_dynamic needs decoupled_gate: true",
            ),
            (
                {**DECOUPLED, "n_kv_heads": 2, "tie_qk": True},
                "tie_qk needs one key head per query head (4), got n_kv_heads=2; set n_kv_heads: 4",
            ),
            ({**DECOUPLED, "layout": "latent"}, "v_dim is not defined for layout=latent"),
            (
                {**DECOUPLED, "v_dim": None, "layout": "latent", "qk_norm": True},
                "qk_norm is not defined for layout=latent",
            ),
            (
                {**DECOUPLED, "v_dim": None, "layout": "latent", "decoupled_gate_dynamic": True},
                "decoupled_gate_dynamic needs decoupled_gate: true",
            ),
            (
                {**DECOUPLED, "v_dim": None, "layout": "latent", "d_model": 66},
                "n_heads=4 does not divide d_model=66; set head_dim, the width of each query",
            ),
        ],
    )
    def test_text_says_got_and_fix(self, fields, text):
        with pytest.raises(ValidationError) as caught:
            attention(**fields)
        assert text in str(caught.value)


class TestWork:
    def test_attention_flops_at_s_keys(self):
        cost = attention().infer(Width(64))
        assert cost.attention_width == 4 * (16 + 16)
        # Five causal positions see 1 + 2 + 3 + 4 + 5 keys, three on average.
        assert cost.flops_per_token(5) == 2 * 4 * 64 * 64 + 2 * 3 * 128

    @pytest.mark.parametrize(("context", "window"), [(1, 1), (7, 3), (7, 7), (7, 20), (64, 16)])
    def test_mean_keys_counts_positions(self, context, window):
        seen = sum(min(position, window) for position in range(1, context + 1))
        assert AttentionWork(8, window).mean_keys(context) * context == seen

    def test_a_window_bounds_what_queries_see_and_not_what_caches_keep(self):
        windowed, plain = attention(local_window=8).infer(Width(64)), attention().infer(Width(64))
        assert windowed.flops_per_token(100) < plain.flops_per_token(100)
        for tokens in (5, 100):
            assert windowed.kv_bytes(KVCacheKind.FP16, tokens) == tokens * 2 * 128
            assert plain.kv_bytes(KVCacheKind.FP16, tokens) == tokens * 2 * 128

    def test_a_null_key_costs_one_key_and_no_cache(self):
        null, plain = attention(null_attn=True).infer(Width(64)), attention().infer(Width(64))
        assert null.params == plain.params + 128
        assert null.flops_per_token(5) == plain.flops_per_token(5) + 2 * 128
        assert null.kv == plain.kv

    def test_quantised_bytes_are_exact(self):
        cost = attention().infer(Width(64))
        bytes_of = {kind: cost.kv_bytes_per_token(kind) for kind in ("fp32", "q8_0", "q4_0", "nf4")}
        assert bytes_of == {"fp32": 512, "q8_0": 136, "q4_0": 72, "nf4": 72}

    def test_auto_has_no_size(self):
        with pytest.raises(ValueError, match="auto has no size before it is chosen"):
            attention().infer(Width(64)).kv_bytes_per_token(KVCacheKind.AUTO)

    def test_activations_of_standard_attention_and_swiglu(self):
        # input, q, k, v, output, its transposed copy of 64 each and one log-sum-exp per head
        assert attention().infer(Width(64)).activation_elements == 6 * 64 + 4
        node = parse_node({"type": "SwiGLULayer", "d_model": 64, "d_ff": 100})
        assert node.infer(Width(64)).activation_elements == 64 + 400


class TestOtherLayers:
    @pytest.mark.parametrize(
        ("node", "params", "matmul"),
        [
            ({"type": "RMSNormLayer", "d_model": 64}, 64, 0),
            ({"type": "RMSNormLayer", "d_model": 64, "elementwise_affine": False}, 0, 0),
            ({"type": "LayerNormLayer", "d_model": 64}, 128, 0),
            ({"type": "LayerNormLayer", "d_model": 64, "bias": False}, 64, 0),
            ({"type": "SwiGLULayer", "d_model": 64, "d_ff": 10}, 1920, 1920),
            ({"type": "SwiGLULayer", "d_model": 64, "d_ff": 10, "bias": True}, 1920 + 84, 1920),
            ({"type": "LinearLayer", "d_in": 64, "d_out": 32}, 2048, 2048),
            ({"type": "LinearLayer", "d_in": 64, "d_out": 32, "bias": True}, 2080, 2048),
            ({"type": "DropoutLayer", "p": 0.5}, 0, 0),
        ],
    )
    def test_params(self, node, params, matmul):
        cost = parse_node(node).infer(Width(64))
        assert (cost.params, cost.matmul_params_used, cost.kv) == (params, matmul, ())
        assert cost.width_out == Width(32 if node["type"] == "LinearLayer" else 64)

    @pytest.mark.parametrize(("reduce", "d_in"), [("mean", 64), ("sum", 64), ("concat", 192)])
    def test_linear_reduces_a_stack(self, reduce, d_in):
        config = LinearLayerConfig.model_validate({"d_in": d_in, "d_out": 8, "reduce": reduce})
        assert config.infer(Width(64, stack=3)).width_out == Width(8)

    @pytest.mark.parametrize(
        ("node", "width", "text"),
        [
            (
                {"type": "RMSNormLayer", "d_model": 64},
                Width(128),
                "expects width 64, got 128 .*; set d_model: 128",
            ),
            (
                {"type": "LinearLayer", "d_in": 64, "d_out": 8},
                Width(32),
                "expects width 64, got 32 .*; set d_in: 32",
            ),
            (
                {"type": "SwiGLULayer", "d_model": 64, "d_ff": 8},
                Width(64, 2),
                "got a stack of 2 x 64 .*; put a LinearLayer",
            ),
            ({"type": "DropoutLayer", "p": 0.1}, Width(64, 2), "got a stack of 2 x 64"),
            (
                {"type": "LinearLayer", "d_in": 64, "d_out": 8, "reduce": "mean"},
                Width(64),
                "expects a stack .*remove reduce",
            ),
            (
                {"type": "LinearLayer", "d_in": 64, "d_out": 8, "reduce": "concat"},
                Width(64, 2),
                "expects width 64 after reduce: concat, got 128 .*; set d_in: 128",
            ),
        ],
    )
    def test_a_wrong_width_names_the_fix(self, node, width, text):
        with pytest.raises(WidthError, match=text):
            parse_node(node).infer(width)


class TestRopeScaling:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"type": "linear", "beta_fast": 16.0},
                "beta_fast belongs to type=yarn, got type=linear; remove it",
            ),
            ({"type": "llama3", "beta_slow": 2.0}, "beta_slow belongs to type=yarn, got type=llama3"),
            ({"type": "dynamic", "attention_factor": 1.2}, "attention_factor belongs to type=yarn"),
            (
                {"type": "yarn", "low_freq_factor": 2.0},
                "low_freq_factor belongs to type=llama3, got type=yarn",
            ),
            ({"type": "dynamic", "high_freq_factor": 8.0}, "high_freq_factor belongs to type=llama3"),
            (
                {"type": "linear", "original_max_position_embeddings": 64},
                "original_max_position_embeddings belongs to type=llama3 and dynamic and yarn, got type=linear",
            ),
            ({"type": "yarn", "beta_fast": 1.0}, "beta_slow=1 must be below beta_fast=1"),
            (
                {"type": "llama3", "low_freq_factor": 4.0},
                "low_freq_factor=4 must be below high_freq_factor=4",
            ),
        ],
    )
    def test_fields_of_another_type_are_refused_by_name(self, fields, message):
        with pytest.raises(ValidationError, match=message):
            RopeScalingConfig.model_validate({"factor": 2.0, **fields})

    @pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic", "yarn"])
    def test_what_a_frozen_manifest_states_is_read_again(self, kind):
        scaling = RopeScalingConfig.model_validate({"type": kind, "factor": 2.0})
        assert RopeScalingConfig.model_validate(scaling.model_dump(mode="json")) == scaling
