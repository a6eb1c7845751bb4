"""Schema of a model: embedder, topology, head, and for an upcycled model its teacher and surgery."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, SerializeAsAny, model_validator

import caramba.config.layer  # noqa: F401  # pyright: ignore[reportUnusedImport]  registers layers
from caramba.config.base import Config, PathText
from caramba.config.extension import parse_node
from caramba.config.kvcache import CacheFormat
from caramba.config.layer_base import Dimension, Positive
from caramba.config.topology import TopologyConfig
from caramba.errors import quote

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_count(value: Any) -> Any:
    """Turn `150M`, `1.2B` or a whole float such as 1e8 into an int; pydantic checks other values itself.

    Raises:
        ValueError: a text that is no count.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    found = _COUNT.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"expected a count such as 150M, 1.2B or 150000000, got {quote(value)}")
    return round(float(found[1]) * _SCALES[found[2].lower()])


class FitConfig(Config):
    """Scale the model to `target_params` parameters, embedder and head counted; `block_size` is its context.

    A launch resolves this section into concrete widths before it freezes the manifest.
    """

    target_params: Annotated[Positive, BeforeValidator(parse_count)] = Field(
        description="parameters of the scaled model, such as 150M, embedder and head included"
    )
    block_size: Positive | None = Field(
        default=None, description="context of the scaled model, in tokens; unset: the one of the training"
    )


def _parse_topology(value: Any) -> Any:
    node = parse_node(value)
    if not isinstance(node, TopologyConfig):
        raise ValueError(
            f"a model's root is a topology, got {quote(getattr(node, 'type', node))}; wrap it in a StackedTopology"
        )
    return node


class EmbedderConfig(Config):
    """Token embedding, with learned position embeddings added when `max_positions` is set."""

    type: Literal["token", "token_position"] = Field(
        default="token", description="token, or token_position with learned position embeddings"
    )
    vocab_size: Dimension = Field(description="entries of the vocabulary")
    d_model: Dimension = Field(description="width of the residual stream")
    max_positions: Dimension | None = Field(default=None, description="learned positions, for type=token_position only")

    @model_validator(mode="after")
    def _positions(self) -> EmbedderConfig:
        if (self.type == "token_position") != (self.max_positions is not None):
            raise ValueError("max_positions is set exactly when type is token_position")
        return self


class HeadConfig(Config):
    """Projection to the vocabulary; `tied` shares the embedder's weight."""

    tied: bool = Field(default=True, description="whether the head shares the weight of the embedder")
    bias: bool = Field(default=False, description="whether an untied head has a bias")

    @model_validator(mode="after")
    def _tied_has_no_bias(self) -> HeadConfig:
        if self.tied and self.bias:
            raise ValueError("a tied head has no bias; set bias: false or tied: false")
        return self


class ModelSpec(Config):
    """A network that can be built: embedder, topology, head."""

    type: Literal["TransformerModel"] = Field(default="TransformerModel", description="class of the model")
    name: str | None = Field(default=None, description="name in reports; unset: none")
    embedder: EmbedderConfig = Field(description="token embedding")
    topology: Annotated[SerializeAsAny[TopologyConfig], BeforeValidator(_parse_topology)] = Field(
        description="the tree of layers between embedder and head"
    )
    head: HeadConfig = Field(default=HeadConfig(), description="projection to the vocabulary")


class TeacherConfig(Config):
    """The pretrained model that a student comes from.

    `checkpoint` is a run directory, a safetensors file, a folder or a hub id; `manifest` describes the network when
    the checkpoint does not carry its own description, or when the teacher is trained here.
    """

    checkpoint: PathText | None = Field(
        default=None,
        description="run, safetensors file, Hugging Face folder or hub id with the weights; unset: trained here",
    )
    manifest: ModelSpec | None = Field(
        default=None, description="network of the teacher; unset: as the checkpoint describes it"
    )

    @model_validator(mode="after")
    def _has_a_source(self) -> TeacherConfig:
        if self.checkpoint is None and self.manifest is None:
            raise ValueError(
                "a teacher needs `checkpoint` (a run, file, folder or hub id) or `manifest` (a network to train here)"
            )
        return self


class SurgeryConfig(Config):
    """How a student's attention is initialised from its teacher's.

    `sem_dim`, `geo_dim`, `v_dim`, `layout` and `exact_first_tokens` are the one place where a preset states what is
    cached: its attention reads them. With `kv_budget_bytes`, bytes per token over all layers at 16 bits, the widths of
    each layer are chosen by measured error instead, and those of the attention are only where the schema starts from.
    """

    method: Literal["dba", "weight_svd", "random", "copy", "memory"] = Field(
        default="dba",
        description="dba (from activations), weight_svd, random, copy (pooled key/value heads), or memory (weights of "
        "the teacher's attention in a MemoryBankLayer, whose slot gates are new)",
    )
    target: Literal["caramba", "mla"] = Field(
        default="caramba",
        description="caramba, or mla: a student of multi-head latent attention, which stock engines load "
        "(caramba export --format deepseek|gguf)",
    )
    sem_dim: Dimension | None = Field(
        default=None, description="cached width of the semantic keys; attention reads it from here"
    )
    geo_dim: Dimension | None = Field(
        default=None, description="cached width of the geometric keys; attention reads it from here"
    )
    v_dim: Dimension | None = Field(
        default=None, description="cached width of the values; attention reads it from here"
    )
    layout: Literal["per_head", "latent"] | None = Field(
        default=None,
        description="layout of the student's cache: per_head or latent; unset: as the attention has it",
    )
    kv_budget_bytes: Positive | None = Field(
        default=None,
        description="bytes of cache per token, all layers together, at 16 bits: widths by measured error",
    )
    kv_budget_formats: tuple[Literal["fp16", "q8_0", "q4_0", "nf4", "mixed"], ...] = Field(
        default=(),
        description="cache formats to choose from under kv_budget_bytes, which then counts their own bytes: latent and "
        "rotary width of each layer and one format, by the measured KL of each layer; empty: widths alone, by block "
        "error",
    )
    calibration_tokens: Positive | None = Field(
        default=None, description="tokens of the train split that statistics are taken over; default 262144"
    )
    exact_first_tokens: NonNegativeInt | None = Field(
        default=None,
        description="first tokens of a sequence whose keys and values stay the teacher's, under layout: latent",
    )
    cache_format: CacheFormat | None = Field(
        default=None,
        description="quantised cache format that the student is trained for: q8_0, q4_0, nf4 or mixed; null is 16 bits",
    )
    local_window: Dimension | None = Field(
        default=None, description="of method=memory and model=hf_memory: window of the student, in tokens"
    )
    memory_slots: Dimension | None = Field(
        default=None, description="of method=memory and model=hf_memory: slots per key/value head"
    )
    memory_first_tokens: NonNegativeInt | None = Field(
        default=None,
        description="of method=memory and model=hf_memory: slots that hold the first tokens as they are, unset: none",
    )
    memory_slot_bias: float | None = Field(
        default=None,
        description="of method=memory and model=hf_memory: initial bias of the scores of other slots, unset: none",
    )


class ModelConfig(ModelSpec):
    """The `model` section: a network, and optionally the teacher that it is upcycled from."""

    path: PathText | None = Field(
        default=None,
        description="a Hugging Face folder or hub id: embedder, topology, head and weights come from it",
    )
    checkpoint: PathText | None = Field(
        default=None,
        description="weights to start this model from: a run, a safetensors file or a Hugging Face folder",
    )
    teacher: TeacherConfig | None = Field(default=None, description="model that this one is upcycled from; unset: none")
    surgery: SurgeryConfig | None = Field(
        default=None, description="how attention is initialised from the teacher; unset: none"
    )

    @model_validator(mode="after")
    def _surgery_needs_a_teacher(self) -> ModelConfig:
        if self.surgery is not None and self.teacher is None:
            raise ValueError("surgery is set without a teacher; add model.teacher or remove surgery")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.path is not None and self.checkpoint is not None:
            raise ValueError("path and checkpoint both give this model its weights; keep one")
        return self
