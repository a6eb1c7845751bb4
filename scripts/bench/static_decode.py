"""The peer: a plain decode loop with a static cache and a mask, compiled whole and captured by hand in a CUDA graph.

It fuses the projections of queries, keys and values and those of gate and up, as fast single-GPU decoders do, and
holds the weights of one of our models, so that both loops say the same tokens.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from models import rotate
from torch import Tensor, nn

from caramba.layer import SwiGLULayer
from caramba.model import Model


class Block:
    """Weights and cache of one block."""

    def __init__(self, model: Model, index: int, mlp: SwiGLULayer, norms: list[nn.Module], shape: tuple[int, ...]):
        attention = model.attention_layers()[index][1]
        projection = attention.projection
        weights = [projection.get_submodule(name).get_parameter("weight") for name in "qkv"]
        self.qkv = torch.cat(weights).detach()
        self.gate_up = torch.cat((mlp.gate.weight, mlp.up.weight)).detach()
        self.out, self.down = attention.out.weight.detach(), mlp.down.weight.detach()
        self.norms = [norm.get_parameter("weight").detach() for norm in norms]
        self.eps = float(norms[0].eps)  # type: ignore[arg-type]
        self.heads, self.kv_heads = attention.dims.n_heads, attention.dims.n_kv_heads
        like = self.qkv
        self.k, self.v = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))

    def step(self, x: Tensor, at: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run one token per sequence at position `at` [1]. Shape: [B, 1, M] to the same."""
        width = self.k.shape[-1]
        found = F.linear(F.rms_norm(x, x.shape[-1:], self.norms[0], self.eps), self.qkv)
        q, k, v = (
            found.unflatten(-1, (-1, width)).transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        )
        self.k.index_copy_(2, at, rotate(k, cos, sin))
        self.v.index_copy_(2, at, v)
        # The heads of a group as queries of one: backends that take a mask do not take grouped heads.
        grouped = rotate(q, cos, sin).unflatten(1, (self.kv_heads, -1)).squeeze(-2)
        masked = mask.expand(-1, -1, grouped.shape[2], -1)
        read = F.scaled_dot_product_attention(grouped, self.k, self.v, attn_mask=masked)
        x = x + F.linear(read.flatten(1)[:, None], self.out)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], self.norms[1], self.eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class StaticDecoder:
    """Greedy decoding of a grouped-query model with `cache` places per sequence, all of which every step reads."""

    def __init__(
        self, model: Model, batch: int, cache: int, *, is_compiled: bool, has_reductions: bool = False
    ) -> None:
        layers = model.attention_layers()
        dims, rope = layers[0][1].dims, layers[0][1].projection.rope
        assert rope is not None
        self.table = model.embedder.token.weight.detach()
        device = self.table.device
        mlps = [module for module in model.modules() if isinstance(module, SwiGLULayer)]
        norms = [module for module in model.modules() if type(module).__name__ == "RMSNormLayer"]
        shape = (batch, dims.n_kv_heads, cache, dims.qk)
        self.blocks = [Block(model, i, mlps[i], norms[2 * i : 2 * i + 2], shape) for i in range(len(layers))]
        self.norm, self.eps = norms[-1].get_parameter("weight").detach(), self.blocks[0].eps
        cos, sin = rope(0, cache, device)
        self.cos, self.sin = cos[0].clone(), sin[0].clone()
        self.mask = torch.ones(cache, cache, dtype=torch.bool, device=device).tril()
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None
        self.is_compiled = is_compiled
        # Sizes are constants, as for a loop that is compiled for one cache alone.
        self._forward = self.forward
        if is_compiled:
            options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if has_reductions else None
            own = FunctionType(StaticDecoder.forward.__code__.replace(), globals(), "forward")
            compiled = torch.compile(own, fullgraph=True, dynamic=False, options=options)
            self._forward = functools.partial(compiled, self)
        self._graph: torch.cuda.CUDAGraph | None = None

    def forward(self, token: Tensor, at: Tensor) -> Tensor:
        """Return the logits after a token. Shape: [B], [1] to [B, V]."""
        x = F.embedding(token, self.table)[:, None]
        mask, cos, sin = self.mask[at][None, None], self.cos[at], self.sin[at]
        for block in self.blocks:
            x = block.step(x, at, mask, cos, sin)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.table)[:, -1]

    def _step(self) -> None:
        self.logits = self._forward(self.token, self.at)
        self.token.copy_(self.logits.argmax(-1))
        self.at += 1

    @torch.inference_mode()
    def fill(self, streams: list[tuple[Tensor, Tensor]], token: Tensor) -> None:
        """Begin after the keys and values of a prompt, [B, K, S, D] for each block, with its next token."""
        for block, (k, v) in zip(self.blocks, streams, strict=True):
            block.k[:, :, : k.shape[2]].copy_(k)
            block.v[:, :, : v.shape[2]].copy_(v)
        self.token.copy_(token)
        self.at.fill_(streams[0][0].shape[2])

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a step after three runs of it on a side stream; on a CPU there is nothing to capture."""
        if not self.token.is_cuda:
            return
        start, token = self.at.clone(), self.token.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
                self.at.copy_(start)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
        self.at.copy_(start)
        self.token.copy_(token)

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        """Run steps one after the other without waiting for any."""
        for _ in range(steps):
            self._step() if self._graph is None else self._graph.replay()
