"""From token ids to features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from caramba.config.model import EmbedderConfig
from caramba.errors import ConfigError


class Embedder(nn.Module):
    """Token embedding, plus a learned embedding of the position for `type: token_position`.

    Shape: tokens [B, T] int64 to [B, T, M].
    """

    def __init__(self, config: EmbedderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Embedding(config.max_positions, config.d_model) if config.max_positions else None

    def forward(self, tokens: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Embed tokens whose first position is `offset`, or whose positions are `offset` [B, T].

        Raises:
            ConfigError: a position at or above max_positions.
        """
        features = self.token(tokens)
        if self.position is None:
            return features
        end = tokens.shape[1] if isinstance(offset, Tensor) else offset + tokens.shape[1]
        if end > self.position.num_embeddings:
            raise ConfigError(
                f"embedder: the sequence reaches {end} tokens, max_positions={self.position.num_embeddings}; "
                "use shorter sequences or a larger max_positions"
            )
        if isinstance(offset, Tensor):
            return features + self.position(offset)
        return features + self.position(torch.arange(offset, end, device=tokens.device))
