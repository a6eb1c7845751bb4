"""Names of tensors, caramba's and those of a Hugging Face Llama: one table, read in both directions. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from caramba.config.extension import NodeConfig
from caramba.config.layer import AttentionLayerConfig, AttentionMode, RMSNormLayerConfig, SwiGLULayerConfig
from caramba.config.layer_base import LayerConfig
from caramba.config.model import ModelSpec
from caramba.config.topology import NestedTopologyConfig, ResidualTopologyConfig, TopologyConfig
from caramba.errors import CheckpointError

LAYER = "model.layers.{layer}."

EMBEDDING: tuple[str, str] = ("embedder.token.weight", "model.embed_tokens.weight")
FINAL_NORM = "model.norm.weight"
HEAD: tuple[str, str] = ("head.weight", "lm_head.weight")

# Within a block: the module of AttentionLayer or SwiGLULayer, and that of a Llama decoder layer. Weights and biases
# share a row, since both are called the same on both sides.
ATTENTION_NORM = "input_layernorm"
FEED_FORWARD_NORM = "post_attention_layernorm"
ATTENTION = {
    "projection.q": "self_attn.q_proj",
    "projection.k": "self_attn.k_proj",
    "projection.v": "self_attn.v_proj",
    "projection.q_norm": "self_attn.q_norm",
    "projection.k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
}
FEED_FORWARD = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}

# Of tables that folders of older libraries carry and no model reads, as they follow from the configuration.
FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Block:
    """One pre-norm block of a Llama-shaped model, and the module names of its four layers."""

    attention_norm: tuple[str, RMSNormLayerConfig]
    attention: tuple[str, AttentionLayerConfig]
    feed_forward_norm: tuple[str, RMSNormLayerConfig]
    feed_forward: tuple[str, SwiGLULayerConfig]


def hf_names(spec: ModelSpec) -> dict[str, str]:
    """Return the Hugging Face name of every tensor of a Llama-shaped model, by caramba's name.

    A tied head has no entry of its own. Invert it for the other direction: names are distinct on both sides.

    Raises:
        CheckpointError: the model is of another shape than a Llama; the message names the part.
    """
    blocks, (final_norm, _) = llama_blocks(spec)
    names = dict((EMBEDDING,))
    for index, block in enumerate(blocks):
        prefix = LAYER.format(layer=index)
        names[f"{block.attention_norm[0]}.weight"] = f"{prefix}{ATTENTION_NORM}.weight"
        names[f"{block.feed_forward_norm[0]}.weight"] = f"{prefix}{FEED_FORWARD_NORM}.weight"
        for (name, config), table in ((block.attention, ATTENTION), (block.feed_forward, FEED_FORWARD)):
            for tensor in config.parameter_shapes():
                own = _module_of(config, tensor)
                module, _, kind = own.rpartition(".")
                if module not in table:
                    raise _refusal(f"{name} has {tensor}, and a Llama layer has no such tensor")
                names[f"{name}.{own}"] = f"{prefix}{table[module]}.{kind}"
    names[f"{final_norm}.weight"] = FINAL_NORM
    if not spec.head.tied:
        names.update((HEAD,))
    return names


def llama_blocks(
    spec: ModelSpec, *, allows_mla: bool = False
) -> tuple[tuple[Block, ...], tuple[str, RMSNormLayerConfig]]:
    """Read a model as pre-norm blocks of attention and SwiGLU, and a final norm with its name.

    Attention is that of a Llama, with `allows_mla` multi-head latent attention too.

    Raises:
        CheckpointError: the model is of another shape than a Llama; the message names the part.
    """
    if spec.embedder.max_positions is not None:
        raise _refusal("it has learned position embeddings")
    if spec.head.bias:
        raise _refusal("its head has a bias")
    *parts, last = _flat(spec.topology, "topology")
    name, norm = last
    if not isinstance(norm, RMSNormLayerConfig) or not norm.elementwise_affine:
        raise _refusal(f"it ends with {name}, expected a scaled RMSNormLayer")
    if not parts or len(parts) % 2:
        raise _refusal(f"it has {len(parts)} residual branches, expected two for each block")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return tuple(_block(first, second, allows_mla) for first, second in pairs), (name, norm)


def _block(first: tuple[str, NodeConfig], second: tuple[str, NodeConfig], allows_mla: bool) -> Block:
    (norm_name, norm), (name, attention) = _branch(*first)
    (second_name, second_norm), (mlp_name, mlp) = _branch(*second)
    if not isinstance(attention, AttentionLayerConfig) or not isinstance(mlp, SwiGLULayerConfig):
        raise _refusal(f"{first[0]} and {second[0]} are not attention followed by SwiGLU")
    if attention.mode not in (AttentionMode.STANDARD, AttentionMode.GQA) and not allows_mla:
        raise _refusal(f"{name} is {attention.mode} attention")
    if not attention.rope_enabled:
        raise _refusal(f"{name} has no rotary positions")
    return Block((norm_name, norm), (name, attention), (second_name, second_norm), (mlp_name, mlp))


def _branch(name: str, node: NodeConfig) -> tuple[tuple[str, RMSNormLayerConfig], tuple[str, LayerConfig]]:
    if isinstance(node, ResidualTopologyConfig) and len(node.layers) == 2:
        norm, layer = node.layers
        if isinstance(norm, RMSNormLayerConfig) and norm.elementwise_affine and isinstance(layer, LayerConfig):
            return (f"{name}.layers.0", norm), (f"{name}.layers.1", layer)
    raise _refusal(f"{name} is not a ResidualTopology of a scaled RMSNormLayer and a layer")


def _flat(node: NodeConfig, name: str) -> Iterator[tuple[str, NodeConfig]]:
    """Yield what runs in depth, residual branches and bare layers, with its module's name."""
    if not isinstance(node, TopologyConfig) or isinstance(node, ResidualTopologyConfig):
        yield name, node
        return
    repeat = node.repeat if isinstance(node, NestedTopologyConfig) else 1
    if node.type not in ("StackedTopology", "SequentialTopology", "NestedTopology"):
        raise _refusal(f"{name} is a {node.type}")
    for index, child in enumerate(node.layers * repeat):
        yield from _flat(child, f"{name}.layers.{index}")


def _module_of(config: LayerConfig, tensor: str) -> str:
    is_projected = isinstance(config, AttentionLayerConfig) and not tensor.startswith("out.")
    return f"projection.{tensor}" if is_projected else tensor


def _refusal(reason: str) -> CheckpointError:
    return CheckpointError(
        f"model: not of a Llama's shape, so its tensors have no names there: {reason}; expected blocks of "
        "x + attention(norm(x)), x + SwiGLU(norm(x)), and a final norm"
    )
