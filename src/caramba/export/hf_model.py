"""A caramba network as a transformers model; an exported folder holds it, with all it needs, as modeling_caramba.py.

Nothing in caramba imports this module: `caramba.export.remote` bundles its source.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from caramba.cache import Context
from caramba.config.attention_dims import AttentionDims
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
        streams = {
            key: tuple((name, heads, width) for name, heads, width in self._dims[key])
            for key in ("streams", "first_streams")
        }
        return AttentionDims(**{**self._dims, **streams})


def _viewed(value: Any) -> Any:
    if isinstance(value, dict):
        return View(value)
    return tuple(_viewed(item) for item in value) if isinstance(value, list | tuple) else value


def build_node(config: View) -> nn.Module:
    """Build the layer or topology that a node describes."""
    return NODES[config.type](config)


class Rows:
    """Sequences of a batch that begin after equally much padding; `index` [b] is their places, None all of them."""

    def __init__(self, padding: int, index: Tensor | None = None) -> None:
        self.padding = padding
        self.index = index
        self.context: Context | None = None

    def position(self) -> int:
        """Return the columns of the batch that are cached, padding included."""
        return 0 if self.context is None else self.padding + self.context.position


class CarambaCache(Cache):
    """The key/value cache of one batch: exactly the streams that each attention layer stores, nothing else.

    Sequences that padding on the left makes equally long are cached separately, by length and without their padding, so
    each sees what it would see alone. `max_tokens` allocates that many columns at once; otherwise they grow.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        super().__init__(layers=[])
        self.max_tokens = max_tokens
        self.rows: list[Rows] = []

    def open(self, model: Model, rows: list[Rows], batch_size: int, dtype: torch.dtype) -> None:
        """Make the contexts of a batch, at its first forward."""
        if dtype not in KINDS:
            raise ValueError(
                f"CarambaForCausalLM: the model is in {dtype}, a cache holds {', '.join(map(str, KINDS))}; call "
                ".float() first, or pass use_cache=False"
            )
        for part in rows:
            limit, is_static = (self.max_tokens or UNBOUNDED_TOKENS), self.max_tokens is not None
            size = batch_size if part.index is None else len(part.index)
            part.context = model.new_context(size, limit - part.padding, KVCacheKind(KINDS[dtype]), static=is_static)
        self.rows = rows

    @property
    def contexts(self) -> list[Context]:
        return [part.context for part in self.rows if part.context is not None]

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns of the batch that are cached, padding included."""
        return self.rows[0].position() if self.rows else 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        """Return the columns that fit, -1 when there is no limit."""
        return self.max_tokens or -1

    def allocated_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(context.nbytes() for context in self.contexts)

    def used_bytes(self) -> int:
        """Return the bytes that the cached tokens take."""
        return sum(context.used_bytes() for context in self.contexts)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each sequence the past of the one that it continues, which is as long."""
        beam_idx = beam_idx.long()
        for part in self.rows:
            chosen = beam_idx
            if part.index is not None:
                places = torch.full_like(beam_idx, -1)
                places[part.index] = torch.arange(len(part.index), device=beam_idx.device)
                chosen = places[beam_idx[part.index]]
                if bool((chosen < 0).any()):
                    raise ValueError("CarambaForCausalLM: a sequence continues one of another length")
            if part.context is not None:
                part.context.select(chosen)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the number is given as transformers does, negative."""
        for context in self.contexts:
            context.truncate(context.position - abs(tokens_to_remove))

    def extend(self, max_tokens: int) -> None:
        """Make room for `max_tokens` columns, if that is more than before: a generation continues an earlier one."""
        if self.max_tokens is None or max_tokens <= self.max_tokens:
            return
        self.max_tokens = max_tokens
        for part in self.rows:
            for cache in part.context.caches if part.context is not None else ():
                cache.extend(max_tokens - part.padding)

    def reset(self) -> None:
        """Forget everything; the next batch may be padded differently."""
        self.rows = []


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
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        """Score tokens; with a cache, those that follow the cached ones.

        `labels` [B, T] adds the mean loss of predicting each from what is before it, -100 excepted.

        Prompts of different lengths are padded on the left, with their attention_mask: each is then scored and
        continued as it would be alone. Logits at padding mean nothing.

        Raises:
            ValueError: no tokens, padding elsewhere, or positions other than 0, 1, 2, … of the tokens.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("CarambaForCausalLM: takes input_ids, and not inputs_embeds")
        if past_key_values is not None and not isinstance(past_key_values, CarambaCache):
            raise ValueError(
                f"CarambaForCausalLM: past_key_values is a {type(past_key_values).__name__}, which stores other "
                "tensors than the model does; take that of an earlier forward, or leave it out"
            )
        use_cache = bool(self.config.use_cache if use_cache is None else use_cache)
        # A cache holds no graph.
        is_cached = past_key_values is not None or (use_cache and not torch.is_grad_enabled() and not self.training)
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            rows, skip = past_key_values.rows, False
            self._check_continuation(attention_mask, input_ids, rows)
        else:
            rows, skip = self._rows(attention_mask, position_ids, input_ids, is_cached), True
            if is_cached:
                past_key_values = CarambaCache() if past_key_values is None else past_key_values
                past_key_values.open(self.model, rows, input_ids.shape[0], self.dtype)
        hidden = self._hidden(input_ids, rows, skip)
        # A number counts places from the end, 0 being all of them; a tensor names them.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(hidden[:, kept])
        loss = None
        if labels is not None:
            targets = labels[:, 1:]
            if attention_mask is not None and rows[0].index is not None:  # nothing is predicted from padding
                targets = targets.masked_fill(attention_mask[:, :-1] == 0, -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten())
        if return_dict is False:
            return tuple(item for item in (loss, logits, past_key_values) if item is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # pyright: ignore[reportArgumentType]

    def _hidden(self, tokens: Tensor, rows: list[Rows], skip: bool) -> Tensor:
        """Run each part of a batch without its padding. Shape: [B, T] to [B, T, M], zero at padding."""
        if rows[0].index is None:
            return self.model.hidden(tokens, rows[0].context)
        out = None
        for part in rows:
            start = part.padding if skip else 0
            found = self.model.hidden(tokens[part.index][:, start:], part.context)
            if out is None:
                out = found.new_zeros(*tokens.shape, found.shape[-1])
            out[part.index, start:] = found
        assert out is not None
        return out

    def _rows(self, mask: Tensor | None, positions: Tensor | None, tokens: Tensor, is_cached: bool) -> list[Rows]:
        """Part a batch by the padding on its left."""
        rows = [Rows(0)]
        steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        is_token = torch.ones_like(tokens, dtype=torch.bool)
        if mask is not None:
            if mask.shape != tokens.shape:
                raise ValueError(
                    f"CarambaForCausalLM: attention_mask is {list(mask.shape)}, expected that of input_ids, "
                    f"{list(tokens.shape)}"
                )
            is_token = mask != 0
        if not bool(is_token.all()):
            change = is_token.long().diff(dim=1)
            is_left, is_right = bool((change >= 0).all()), bool((change <= 0).all())
            if not bool(is_token.any(dim=1).all()):
                raise ValueError("CarambaForCausalLM: a sequence of the batch is padding alone; leave it out")
            if not is_left and (is_cached or not is_right):
                raise ValueError(
                    "CarambaForCausalLM: got padding that tokens would attend to; pad prompts on the left, with "
                    "padding_side='left' of the tokenizer (without a cache, padding on the right is fine)"
                )
            if is_left:
                padding = (~is_token).sum(dim=1)
                steps = steps - padding[:, None]
                sizes = padding.unique().tolist()
                rows = [Rows(size, (padding == size).nonzero().flatten()) for size in sizes]
        if positions is not None and not torch.equal(
            positions.expand_as(tokens)[is_token], steps[is_token].to(positions.dtype)
        ):
            raise ValueError("CarambaForCausalLM: position_ids are 0, 1, 2, … of the tokens; leave them out")
        return rows

    def _check_continuation(self, mask: Tensor | None, tokens: Tensor, rows: list[Rows]) -> None:
        """Refuse a mask that hides what is cached or what comes now."""
        if mask is None:
            return
        columns = rows[0].position() + tokens.shape[1]
        padding = torch.zeros(tokens.shape[0], dtype=torch.long, device=mask.device)
        for part in rows:
            if part.index is not None:
                padding[part.index] = part.padding
        expected = torch.arange(columns, device=mask.device) >= padding[:, None]
        if not torch.equal(mask != 0, expected):
            raise ValueError(
                "CarambaForCausalLM: attention_mask differs from that of the cached tokens, or hides new ones; give it "
                "over cached and new tokens, or leave it out"
            )

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
        past = model_kwargs.get("past_key_values")
        if isinstance(past, CarambaCache):
            past.extend(max_cache_length)
        elif past is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = CarambaCache(max_cache_length)
