"""The control of fewer key/value heads: the head count whose bytes come nearest."""

from __future__ import annotations

import pytest

from caramba.config.surgery import fewer_kv_heads
from caramba.config.topology import attention_configs
from caramba.errors import ConfigError
from caramba.model import build_model
from tests.unit.surgery.models import latent_spec, spec


@pytest.mark.parametrize(("per_layer", "kv_heads"), [(1, 1), (16, 1), (23, 1), (24, 2), (32, 2)])
def test_the_nearest_cache_wins_and_of_two_equally_near_the_larger(per_layer: int, kv_heads: int):
    teacher = spec(mode="standard", n_kv_heads=4)  # caches 64 elements a layer, 16 with one head
    pooled = fewer_kv_heads(teacher, 2 * per_layer)
    layers = attention_configs(pooled.topology)
    assert [(layer.mode, layer.dims().n_kv_heads, layer.dims().qk) for layer in layers] == [("gqa", kv_heads, 8)] * 2
    names = [list(build_model(item, device="meta").state_dict()) for item in (teacher, pooled)]
    assert names[0] == names[1]


def test_a_budget_near_the_teacher_and_attention_without_heads_to_pool_are_refused():
    with pytest.raises(ConfigError, match=r"60 cached elements.*the teacher's own 64.*next possible is 32"):
        fewer_kv_heads(spec(), 60)
    with pytest.raises(ConfigError, match=r"teacher with mode=decoupled"):
        fewer_kv_heads(latent_spec(6, 4), 8)
