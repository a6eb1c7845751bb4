"""A caramba network as a transformers model; an exported folder holds it, with all it needs, as modeling_caramba.py.

Nothing in caramba imports this module: `caramba.export.remote` bundles its source.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from caramba.cache import Context
from caramba.config.attention import AttentionDims
from caramba.config.kvcache import KVCacheKind
from caramba.export.hf_config import CarambaConfig
from caramba.model.model import Model

NODES: dict[str, Any] = {}
ENUMS: dict[str, Any] = {}
KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
UNBOUNDED_TOKENS = 1 << 30


class View:
    """Plain data as a layer's constructor reads it: keys are attributes, lists tuples, mappings views."""

    type: str

    def __init__(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if key in ENUMS and value is not None:
                value = ENUMS[key](value)
            if key != "dims":
                setattr(self, key, _viewed(value))
        self._dims = values.get("dims")

    def dims(self) -> AttentionDims:
        """Return the widths of an attention layer."""
        assert self._dims is not None
        streams = tuple((name, heads, width) for name, heads, width in self._dims["streams"])
        return AttentionDims(**{**self._dims, "streams": streams})


def _viewed(value: Any) -> Any:
    if isinstance(value, dict):
        return View(value)
    return tuple(_viewed(item) for item in value) if isinstance(value, list | tuple) else value


def build_node(config: View) -> nn.Module:
    """Build the layer or topology that a node describes."""
    return NODES[config.type](config)


class CarambaCache(Cache):
    """The key/value cache of one batch: exactly the streams that each attention layer stores, nothing else.

    `max_tokens` allocates the buffers at once for that many; otherwise they grow with the sequence.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        super().__init__(layers=[])
        self.max_tokens = max_tokens
        self.context: Context | None = None

    def open(self, model: Model, batch_size: int, dtype: torch.dtype) -> Context:
        """Return the context of a batch, made for it at its first forward."""
        if self.context is None:
            limit, is_static = self.max_tokens or UNBOUNDED_TOKENS, self.max_tokens is not None
            self.context = model.new_context(batch_size, limit, KVCacheKind(KINDS[dtype]), static=is_static)
        return self.context

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that are cached per sequence."""
        return 0 if self.context is None else self.context.position

    def get_max_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that fit, -1 when there is no limit."""
        return self.max_tokens or -1

    def allocated_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return 0 if self.context is None else self.context.nbytes()

    def used_bytes(self) -> int:
        """Return the bytes that the cached tokens take."""
        return 0 if self.context is None else self.context.used_bytes()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each sequence the past of the one that it goes on from."""
        if self.context is not None:
            self.context.select(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the number is given as transformers does, negative."""
        if self.context is not None:
            self.context.truncate(self.context.position - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget everything."""
        if self.context is not None:
            self.context.truncate(0)


class CarambaForCausalLM(PreTrainedModel, GenerationMixin):
    """A caramba network behind transformers' interface.

    Shape: input_ids [B, T] int64 to logits [B, T, V].
    """

    config_class = CarambaConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    # Half precision cannot hold an angle.
    _keep_in_fp32_modules_strict = {"inv_freq"}

    def __init__(self, config: CarambaConfig) -> None:
        super().__init__(config)
        assert config.spec is not None
        self.model = Model(View(config.spec))  # pyright: ignore[reportArgumentType]
        # Loading replaces buffers that a checkpoint does not hold by empty ones, so it holds them all.
        for module in self.model.modules():
            module._non_persistent_buffers_set.clear()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave weights as they are: a folder holds all of them."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedder.token

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: CarambaCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        """Score tokens; with a cache, those that follow the cached ones.

        `labels` [B, T] adds the mean loss of predicting each from what is before it, -100 excepted.

        Raises:
            ValueError: no tokens, padding on the left, or positions other than 0, 1, 2, … after the cached ones.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("CarambaForCausalLM: takes input_ids, and not inputs_embeds")
        use_cache = bool(self.config.use_cache if use_cache is None else use_cache)
        # A cache holds no graph.
        is_cached = past_key_values is not None or (
            use_cache and not torch.is_grad_enabled() and not self.training
        )
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if seen == 0:
            self._check_places(attention_mask, position_ids, input_ids, is_cached)
        if is_cached:
            past_key_values = CarambaCache() if past_key_values is None else past_key_values
            context = past_key_values.open(self.model, input_ids.shape[0], self.dtype)
            hidden = self.model.hidden(input_ids, context)
        else:
            hidden = self.model.hidden(input_ids)
        logits = self.model.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        if return_dict is False:
            return tuple(item for item in (loss, logits, past_key_values) if item is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # pyright: ignore[reportArgumentType]

    def _check_places(
        self, mask: Tensor | None, positions: Tensor | None, tokens: Tensor, is_cached: bool
    ) -> None:
        if mask is not None and mask.shape == tokens.shape and not bool(mask.all()):
            is_right = bool((mask.long().diff(dim=1) <= 0).all())
            if is_cached or not is_right:
                raise ValueError(
                    "CarambaForCausalLM: got padding that tokens would attend to; give prompts of one length, or one "
                    "prompt at a time (without a cache, padding on the right is fine)"
                )
            return
        if positions is not None:
            expected = torch.arange(tokens.shape[1], device=positions.device)
            if not torch.equal(positions, expected.expand_as(positions)):
                raise ValueError("CarambaForCausalLM: position_ids are 0, 1, 2, …; leave them out")

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"CarambaForCausalLM: cache_implementation={generation_config.cache_implementation!r} would store "
                "other tensors than the model does; leave it out"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = CarambaCache(max_cache_length)
