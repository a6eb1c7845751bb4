"""The base of the layers, and the number types that schemas share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from caramba.config.cost import Cost, Width
from caramba.config.node import NodeConfig

Positive = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Shapes = dict[str, tuple[int, ...]]


class LayerConfig(NodeConfig):
    """A node without children; the torch module has exactly the tensors of `parameter_shapes`."""

    def parameter_shapes(self) -> Shapes:
        """Return every trainable tensor's shape; those of two or more dimensions multiply activations."""
        return {}

    def infer(self, width: Width) -> Cost:
        """Check the width that comes in and return what the layer costs.

        Raises:
            WidthError: the layer does not take this width.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define infer(width) -> Cost")
