"""The base of the layers, and the number types that schemas share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from caramba.config.cost import Cost, Unknown, Width, expect_width, layer_cost
from caramba.config.extension import NodeConfig
from caramba.config.kvcache import Streams

Positive = Annotated[int, Field(gt=0, le=2**63 - 1)]
"""What a 64-bit integer of torch holds."""
Dimension = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""A width of a layer; products of two are sizes of tensors."""
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Shapes = dict[str, tuple[int, ...]]

Decoding = Literal["per_token", "cached", "refused"]


class LayerConfig(NodeConfig):
    """A node without children; the torch module has exactly the tensors of `parameter_shapes`.

    A custom layer declares by `decoding` how its model may be decoded token by token: `per_token` looks at no other
    token and needs no cache, `cached` keeps the streams of `cached_streams`, and a model with a `refused` layer decodes
    with no cache, and so not at all. The layers of caramba answer for themselves.
    """

    decoding: ClassVar[Decoding] = "refused"

    def parameter_shapes(self) -> Shapes:
        """Return every trainable tensor's shape; those of two or more dimensions multiply activations."""
        return {}

    def cached_streams(self) -> Streams:
        """Return (name, heads, width per head) of what a `cached` layer keeps of every token: [B, heads, S, width]."""
        return ()

    def macs_per_token(self) -> int | None:
        """Return the multiplications of a forward per token, without those of biases and norms; None is unknown."""
        return None

    def saved_elements(self) -> int | None:
        """Return the elements per token that autograd keeps for the backward pass; None is unknown."""
        return None

    def infer(self, width: Width) -> Cost:
        """Check the width that comes in and return what the layer costs.

        A layer of a person's own need not define it where it takes and gives `d_model` features, a field of that name:
        its cost is then what its other methods declare.

        Raises:
            WidthError: the layer does not take this width.
        """
        d_model: int | None = getattr(self, "d_model", None)
        if d_model is None:
            return super().infer(width)
        expect_width(width, d_model, "d_model")
        macs = self.macs_per_token()
        cost = layer_cost(
            "",
            self.type,
            width,
            width,
            self.parameter_shapes(),
            self.saved_elements(),
            streams=self.cached_streams(),
        )
        unknown: set[tuple[Unknown, str]] = {("flops", self.type)} if macs is None else set()
        return dataclasses.replace(cost, matmul_params_used=macs or 0, unknown=cost.unknown | unknown)
