"""Gates that weigh the semantic path of attention against the geometric one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from caramba.config.layer import AttentionLayerConfig
from caramba.layer.projection import Projection
from caramba.ops.backend import upcast


class GatedProjection(Projection):
    """A projection of two paths, semantic and geometric, that `decoupled_gate` weighs against each other.

    Per head by 2 s and 2 - 2 s with s = sigmoid(gate), neutral at gate = 0; `decoupled_gate_dynamic` adds a
    projection of x to the gate.
    """

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        heads = self.dims.n_heads
        self.gate = nn.Parameter(torch.zeros(heads)) if config.decoupled_gate else None
        self.gate_dynamic = (
            nn.Linear(config.d_model, heads, bias=False) if config.decoupled_gate_dynamic else None
        )

    def reset_parameters(self) -> None:
        """Set gate and temperature to their neutral values."""
        super().reset_parameters()
        if self.gate is not None:
            nn.init.zeros_(self.gate)
        if self.gate_dynamic is not None:
            nn.init.zeros_(self.gate_dynamic.weight)

    def _apply_gates(self, x: Tensor, q_sem: Tensor, q_geo: Tensor) -> tuple[Tensor, Tensor]:
        """Return both paths' queries [B, H, T, D] times their weights, in at least fp32."""
        q_sem, q_geo = upcast(q_sem), upcast(q_geo)
        if self.gate is None:
            return q_sem, q_geo
        logits = upcast(self.gate)[:, None, None]
        if self.gate_dynamic is not None:
            logits = logits + upcast(self.gate_dynamic(x)).transpose(1, 2)[..., None]
        share = 2.0 * torch.sigmoid(logits)
        return q_sem * share, q_geo * (2.0 - share)

    def _concatenate_paths(
        self, x: Tensor, q_sem: Tensor, q_geo: Tensor, dtype: torch.dtype, *extra: Tensor
    ) -> Tensor:
        """Return the gated and scaled queries of both paths concatenated, [B, H, T, Dsem + Dgeo] in `dtype`.

        Ungated queries `extra` are appended.

        They are cast first and concatenated in the projections' memory order [B, T, H, ·], which fused backends keep in
        their output, so that no transposing copy is needed.
        """
        parts = [
            self.scale_queries(part, dtype).transpose(1, 2)
            for part in (*self._apply_gates(x, q_sem, q_geo), *extra)
        ]
        return torch.cat(parts, dim=-1).transpose(1, 2)
