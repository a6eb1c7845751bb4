"""Any topology as a transformers folder: its description as plain data, and code that runs without caramba."""

import ast
import dataclasses
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from torch import Tensor

from caramba.config.attention_dims import AttentionDims
from caramba.config.extension import NodeConfig
from caramba.config.model import ModelSpec
from caramba.errors import ConfigError
from caramba.export.bundle import PACKAGE, Bundle, Place
from caramba.model import Model
from caramba.model.topology import attention_applications

MODEL, CONFIG = "caramba.export.hf_model", "caramba.export.hf_config"
MODELLING_FILE, CONFIGURATION_FILE = "modeling_caramba.py", "configuration_caramba.py"

# transformers' caches take the model's own dtype, so quantised storage and its ops stay behind.
EXACT_STORE = '''def open_store(config, **shape):
    """Return the empty storage of a format."""
    return ExactStore(config.dtype, **shape)
'''

# Kernels stay behind too: layers ask first whether there are any, and then take plain PyTorch.
ASKED = {"has_kernel": "op, x", "is_fused": "op, x", "fused_decode_available": "cache, device"}
NEVER_CALLED = (
    "absorbed_queries",
    "absorbed_step",
    "cos_sin",
    "dba_append",
    "dba_decode",
    "dba_decode_up",
    "decoupled_attention",
    "per_head_linear",
    "latent_queries",
    "layer_norm",
    "rms_norm",
    "rope",
    "rope_qkv",
    "rope_cos_sin",
    "small_batch_linear",
    "store_tokens",
    "swiglu",
)
"""Ops, each in the module of its name."""

# No such folder holds custom layers, so their checks are empty.
_OWN = "caramba.model.custom_layers"
NO_OWN_LAYERS: dict[Place, tuple[str, str]] = {
    ("caramba.model.topology.base", "own_config"): ("module", "None"),
    ("caramba.model.topology.base", "custom_layers_of"): ("model", "[]"),
    (_OWN, "refuse_documents"): ("model", "None"),
    (_OWN, "check_decoding"): ("model", "None"),
}
SLOT_MEMORY = """class SlotMemory:
    def __init__(self, model):
        raise NotImplementedError("memory slots are measured and resized in caramba alone")
"""
NEW_CACHE = '''def new_cache(layer, *args, windowed=False, **options):
    """Return an empty cache of an attention application; it keeps every token, as none asks for a window alone."""
    make = getattr(layer, "new_cache", None)  # of memory slots
    return new_layer_cache(layer.dims, *args, **options) if make is None else make(*args, **options)
'''
ATTEND_WITH_PREFIX = '''def attend_with_prefix(*given):
    """Return causal attention joined with a known part, and the log-sum-exp of the whole."""
    out, lse = reference_prefix_attention(*given)
    return out, lse.detach()
'''


def plain_spec(value: Any) -> Any:
    """Turn a spec into JSON data that also holds what its schema classes derive (`dims` and properties)."""
    if isinstance(value, BaseModel):
        plain = {name: plain_spec(getattr(value, name)) for name in type(value).model_fields}
        plain |= {name: plain_spec(getattr(value, name)) for name in _derived(type(value))}
        if callable(dims := getattr(value, "dims", None)):
            plain["dims"] = dataclasses.asdict(cast("AttentionDims", dims()))
        return plain
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [plain_spec(item) for item in value]
    return value


def _derived(schema: type[BaseModel]) -> list[str]:
    ours = [cls for cls in schema.__mro__ if cls.__module__.startswith(f"{PACKAGE}.config.")]
    return sorted({name for cls in ours for name, item in vars(cls).items() if isinstance(item, property)})


def remote_config(model: Model, *, max_positions: int, eos_id: int | None, dtype: str) -> dict[str, Any]:
    """Return the content of config.json."""
    spec = model.spec
    return {
        "architectures": ["CarambaForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{Path(CONFIGURATION_FILE).stem}.CarambaConfig",
            "AutoModelForCausalLM": f"{Path(MODELLING_FILE).stem}.CarambaForCausalLM",
        },
        "model_type": "caramba",
        "spec": plain_spec(ModelSpec.model_validate(_network(spec))),
        "vocab_size": spec.embedder.vocab_size,
        "hidden_size": spec.embedder.d_model,
        "num_hidden_layers": sum(1 for _ in attention_applications(model)),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,  # a tied head reads the embedding itself, there is no second name
        "use_cache": True,
        "eos_token_id": eos_id,
        "dtype": dtype,
    }


def remote_tensors(model: Model) -> dict[str, Tensor]:
    """Return every parameter and buffer under the name that the exported class gives it."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {f"model.{name}": tensor.detach().cpu() for name, tensor in named.items()}


def remote_code(spec: ModelSpec) -> dict[str, str]:
    """Return the files of code by name; together they need torch and transformers alone.

    Raises:
        ConfigError: a layer whose class is not caramba's own.
    """
    nodes = {node.type: node for node in _nodes(spec.topology)}
    targets: dict[str, str] = {}
    for name, node in sorted(nodes.items()):
        targets[name] = node.target
    enums = dict(pair for node in _nodes(spec.topology) for pair in _enums(node))
    return _code(tuple(targets.items()), tuple(sorted(enums.items())))


@lru_cache(maxsize=8)
def _code(targets: tuple[tuple[str, str], ...], enums: tuple[tuple[str, str], ...]) -> dict[str, str]:
    bundle = Bundle(here={CONFIG: f".{Path(CONFIGURATION_FILE).stem}"})
    bundle.move(("caramba.model.topology.base", "build_node"), (MODEL, "build_node"))
    bundle.give(("caramba.cache.tensor", "open_store"), EXACT_STORE, [("caramba.cache.store", "ExactStore")])
    for name, arguments in ASKED.items():
        text = f'def {name}({arguments}):\n    """No kernels of ours are here."""\n    return False\n'
        bundle.give(("caramba.ops.backend", name), text)
    for name in NEVER_CALLED:
        text = f'def {name}(*arguments, **options):\n    raise NotImplementedError("{name}: no kernel is here")\n'
        bundle.give((f"caramba.ops.{name}", name), text)
    for place, (argument, answer) in NO_OWN_LAYERS.items():
        text = f'def {place[1]}({argument}):\n    """No custom layer is here."""\n    return {answer}\n'
        bundle.give(place, text)
    bundle.give(("caramba.model.memory", "SlotMemory"), SLOT_MEMORY)
    bundle.give((_OWN, "new_cache"), NEW_CACHE, [("caramba.cache.layer", "new_layer_cache")])
    attention = "caramba.ops.prefix_attention"
    bundle.give((attention, "attend_with_prefix"), ATTEND_WITH_PREFIX, [(attention, "reference_prefix_attention")])
    bundle.give((MODEL, "NODES"), *_table("NODES", targets))
    bundle.give((MODEL, "ENUMS"), *_table("ENUMS", enums))
    bundle.add((MODEL, "CarambaForCausalLM"))
    code = bundle.render(
        "A caramba network for transformers. Written by `caramba export` from caramba's own source; do not edit."
    )
    compile(code, MODELLING_FILE, "exec")
    foreign = sorted(_imported(code) & {PACKAGE, "pydantic"})
    if foreign:
        raise ConfigError(
            f"export: the code of this model imports {foreign[0]}, so it cannot stand alone; a layer's"
            " module may use its schema class in annotations only"
        )
    return {MODELLING_FILE: code, CONFIGURATION_FILE: _source_of(CONFIG)}


def _table(name: str, entries: tuple[tuple[str, str], ...]) -> tuple[str, list[Place]]:
    places: list[Place] = []
    lines = [f"{name} = {{"]
    for key, target in entries:
        module, _, cls = target.partition(":")
        if not module.startswith(f"{PACKAGE}."):
            raise ConfigError(
                f"export: {key} is {target}, which is not part of caramba; a folder for transformers holds caramba's "
                "layers only, use --format safetensors"
            )
        places.append((module, cls))
        lines.append(f'    "{key}": {cls},')
    return "\n".join([*lines, "}"]) + "\n", places


def _imported(code: str) -> set[str]:
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in names}


def _source_of(module: str) -> str:
    return (Path(__file__).parent / f"{module.rsplit('.', 1)[-1]}.py").read_text(encoding="utf-8")


def _network(spec: ModelSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ModelSpec.model_fields}


def _nodes(value: Any) -> list[NodeConfig]:
    """Return every node of a topology, parents first."""
    found = [value] if isinstance(value, NodeConfig) else []
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            found += _nodes(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            found += _nodes(item)
    return found


def _enums(node: NodeConfig) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name in type(node).model_fields:
        value = getattr(node, name)
        if isinstance(value, Enum):
            found.append((name, f"{type(value).__module__}:{type(value).__name__}"))
    return found
