"""A caramba network's configuration for transformers; an exported folder holds it as configuration_caramba.py."""

from typing import Any

from transformers import PreTrainedConfig


class CarambaConfig(PreTrainedConfig):
    """Describes a network by its `spec`: embedder, topology and head as plain data.

    The other fields repeat, under the names that tools look for, what follows from the spec: `hidden_size` is M,
    `num_hidden_layers` the number of attention applications of one forward, `max_position_embeddings` the longest
    sequence trained on (positions continue beyond it unless they are learned).
    """

    model_type = "caramba"

    def __init__(
        self,
        spec: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        num_hidden_layers: int | None = None,
        max_position_embeddings: int | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.spec = spec
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(**kwargs)
