"""A skip connection around a list of nodes."""

from __future__ import annotations

from torch import Tensor

from caramba.cache import Context, DeviceContext
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents
from caramba.layer.rms_norm import RMSNormLayer
from caramba.layer.small_batch import has_hooks, is_small_batch
from caramba.layer.swiglu import SwiGLULayer
from caramba.model.topology.base import Topology


class ResidualTopology(Topology):
    """y = x + f(x), f being the list run in order.

    In small-batch decode a norm and an attention or MLP layer run as that layer's fused linears if there is a kernel.

    Shape: [..., M] to [..., M].

    Reference: He et al., 2015, arXiv:1512.03385.
    """

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        if isinstance(ctx, (Context, DeviceContext)) and is_small_batch(x):
            added = self._fused_residual(x, ctx)
            if added is not None:
                return added
        return x + self.run(x, ctx)

    def _fused_residual(self, x: Tensor, ctx: Context | DeviceContext) -> Tensor | None:
        """Return y with norm and sum fused into the linears, or None if a node was modified."""
        norm, layer = self.layers[0], self.layers[-1]
        if len(self.layers) != 2 or type(norm) is not RMSNormLayer or has_hooks(norm) or has_hooks(layer):
            return None
        # Exact types: tensor parallelism changes the class of a layer.
        if type(layer) is AttentionLayer and layer.is_unmodified(x):
            return layer.fused_residual(x, norm, ctx)
        if type(layer) is SwiGLULayer and layer.is_unmodified(x):
            return layer.fused_residual(x, norm)
        return None
