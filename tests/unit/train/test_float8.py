"""Which layers of a model take part in float8, and which are named as left."""

from __future__ import annotations

from torch import nn

from caramba.config.layer import AttentionLayerConfig, AttentionMode, SwiGLULayerConfig
from caramba.model.topology import build_node
from caramba.train.callbacks.model_changes import float8_layers


def test_layers_of_one_product_are_as_wide_as_it_and_others_are_named() -> None:
    parts = {
        "attention": build_node(AttentionLayerConfig(d_model=32, mode=AttentionMode.GQA, n_heads=2, n_kv_heads=1)),
        "ffn": build_node(SwiGLULayerConfig(d_model=32, d_ff=40)),
        "head": nn.Linear(32, 64),
    }
    model = nn.ModuleDict(parts)
    names = [f"attention.projection.{name}" for name in "qkv"]
    chosen, left = float8_layers(model, 32, is_compiled=True)
    assert list(chosen) == [*names, "attention.out"], "k and v are 16 wide, and parts of a product that is 64 wide"
    assert left == {
        f"ffn.{name}": f"{sizes} features, of which one is no multiple of 16"
        for name, sizes in (("gate", "32 to 40"), ("up", "32 to 40"), ("down", "40 to 32"))
    }
    for is_compiled in (False, True):  # the second time q is frozen: neither makes one product
        chosen, left = float8_layers(model, 32, is_compiled=is_compiled)
        assert (list(chosen), len(left)) == ([names[0], "attention.out"], 5)
        model.get_submodule(names[0]).requires_grad_(False)
    chosen, left = float8_layers(model, 48, is_compiled=True)
    assert (list(chosen), left[names[1]]) == ([], "32 to 16 features, of which one is below 48")
