"""An example plugin, used by tests: `plugins=[gated_conv]` from the folder that holds it."""

from gated_conv.schema import GatedConvLayerConfig, ScaledLayerConfig

__all__ = ["GatedConvLayerConfig", "ScaledLayerConfig"]
