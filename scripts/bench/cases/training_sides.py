"""What caramba's training step is measured against: transformers, a bare loop with joined products, our model bare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import attention
from torch.nn import functional as F

from caramba.config.model import ModelSpec
from caramba.distill import LanguageModelObjective
from caramba.export.llama import llama_config
from caramba.layer.float8 import Float8Linear, Float8Recipe
from caramba.model import build_with_random_weights
from caramba.optim import AdamW, MasterWeights, clip_gradients
from caramba.train.callbacks.float8 import float8_layers


class BareBlock(nn.Module):
    """A Llama block as one would write it for speed: q, k and v in one product, gate and up in another."""

    def __init__(self, d_model: int, heads: int, kv_heads: int, d_ff: int, eps: float) -> None:
        super().__init__()
        width = d_model // heads
        self.widths, self.width, self.eps = (heads * width, kv_heads * width, kv_heads * width), width, eps
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(d_model)) for _ in range(2)])
        self.qkv = nn.Linear(d_model, sum(self.widths), bias=False)
        self.out = nn.Linear(heads * width, d_model, bias=False)
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], self.norms[0], self.eps)
        q, k, v = (
            part.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in self.qkv(h).split(self.widths, dim=-1)
        )
        is_grouped = q.shape[1] != k.shape[1]
        heads = F.scaled_dot_product_attention(
            turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True, enable_gqa=is_grouped
        )
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[-1:], self.norms[1], self.eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of [B, N, T, D] by tables [T, D/2]."""
    real, imaginary = x.float().chunk(2, dim=-1)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1).to(x.dtype)


class BareLlama(nn.Module):
    """The same shapes as the preset's; returns the mean cross-entropy, logits of the whole batch at once."""

    def __init__(self, spec: ModelSpec, keys: dict[str, Any], length: int) -> None:
        super().__init__()
        d_model, heads, kv_heads = (
            keys["hidden_size"],
            keys["num_attention_heads"],
            keys["num_key_value_heads"],
        )
        self.eps = keys["rms_norm_eps"]
        self.embed = nn.Embedding(spec.embedder.vocab_size, d_model)
        self.blocks = nn.ModuleList(
            BareBlock(d_model, heads, kv_heads, keys["intermediate_size"], self.eps)
            for _ in range(keys["num_hidden_layers"])
        )
        self.norm = nn.Parameter(torch.ones(d_model))
        pairs = d_model // heads // 2
        angles = torch.arange(length)[:, None] * 5e5 ** (-torch.arange(pairs) / pairs)
        self.tables = (angles.cos(), angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        cos, sin = self.tables
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Masters:
    """AdamW in one kernel over float32 copies of bfloat16 weights: what masters cost at least in plain PyTorch."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        self.weights = weights
        self.masters = [nn.Parameter(weight.detach().float()) for weight in weights]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.inner = torch.optim.AdamW(self.masters, lr=lr, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters and round the weights from them."""
        torch._foreach_copy_([master.grad for master in self.masters], [w.grad for w in self.weights])  # type: ignore[attr-defined]
        self.inner.step()
        torch._foreach_copy_(self.weights, self.masters)  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for weight in self.weights:
            weight.grad = None


Loss = Callable[[], Tensor]
LOSSES = 20  # of as many first steps, kept


class Side:
    """A bare training loop: forward, backward, clipping where asked for, the optimiser, gradients set to None.

    Every step of it is taken within `surroundings()`. `optimizer` None is torch's own AdamW, of masters if asked.
    """

    def __init__(
        self,
        net: nn.Module,
        backward: Callable[[], None],
        *,
        has_masters: bool,
        clip: float | None,
        surroundings: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        self.net, self.run_backward, self.clip = net, backward, clip
        self.losses: list[Tensor] = []
        self.surroundings = surroundings
        weights = list(net.parameters())
        self.weights = weights
        self.optimizer: Any = optimizer
        if optimizer is None:
            self.optimizer = (
                Masters(weights, 1e-5) if has_masters else torch.optim.AdamW(weights, lr=1e-5, fused=True)
            )

    def step(self) -> None:
        """Take one step."""
        self.run_backward()
        if self.clip is not None:
            clip_gradients([self.weights], self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def held_bytes(self) -> int:
        """Bytes of what the side holds between steps: weights, states and masters."""
        inner = getattr(self.optimizer, "inner", self.optimizer)
        tensors: list[Tensor] = [*self.weights, *getattr(self.optimizer, "masters", [])]
        tensors += [wide.detach() for wide in getattr(self.optimizer, "wide", [])]
        tensors += [master.grad for master in getattr(self.optimizer, "masters", [])]
        tensors += [x for state in inner.state.values() for x in state.values() if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in tensors)


def torchs_own_backends(device: torch.device) -> list[attention.SDPBackend]:
    """Return the backends of scaled_dot_product_attention in the order in which torch tries them by itself.

    Call it before anything sets an order. Torch settles its own at the first call on a device.
    """
    x = torch.zeros(1, 1, 8, 64, device=device, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return attention._cur_sdpa_kernel_backends(with_priority=True)


def as_it_comes(
    own: list[attention.SDPBackend],
) -> Callable[[], AbstractContextManager[Any]]:
    """Surroundings in which torch picks the backend as it does in a process of its own."""
    return lambda: attention.sdpa_kernel(own, set_priority=True)


@contextlib.contextmanager
def without_masks() -> Iterator[None]:
    """Let transformers make no causal mask, so that SDPA may take the backend that leads here: see beside_transformers.

    Taken back at the end, since the same process measures transformers as it comes.
    """
    from cases.beside_transformers import rely_on_is_causal
    from transformers.models.llama import modeling_llama

    module: Any = modeling_llama
    before = module.create_causal_mask
    rely_on_is_causal()
    try:
        yield
    finally:
        module.create_causal_mask = before


def transformers_side(spec: ModelSpec, x: Tensor, compiled: bool, **options: Any) -> Side:
    """LlamaForCausalLM with its own loss, compiled whole."""
    import transformers

    keys = llama_config(spec, max_positions=131072, eos_id=None, dtype="bfloat16")
    keys = {key: value for key, value in keys.items() if key not in ("architectures", "model_type", "dtype")}
    with torch.device(x.device):
        net = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**keys), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()
    call = torch.compile(net, dynamic=False) if compiled else net
    return Side(net, lambda: call(input_ids=x, labels=x, use_cache=False).loss.backward(), **options)


def bare_side(spec: ModelSpec, x: Tensor, y: Tensor, compiled: bool, **options: Any) -> Side:
    """The bare model, compiled whole."""
    keys = llama_config(spec, max_positions=131072, eos_id=None, dtype="bfloat16")
    with torch.device(x.device):
        net = BareLlama(spec, keys, x.shape[1]).to(torch.bfloat16)
        for weight in net.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
    call = torch.compile(net, dynamic=False) if compiled else net
    return Side(net, lambda: call(x, y).backward(), **options)


def ours_bare(
    spec: ModelSpec,
    x: Tensor,
    y: Tensor,
    compiled: bool,
    *,
    float8: Float8Recipe | None = None,
    least_width: int = 1024,
    **options: Any,
) -> Side:
    """Our own model with the objective and the compiled regions that a phase uses, without Lightning around it.

    With `float8`, products of the layers that a phase would choose are of such numbers. The losses of the first
    `LOSSES` steps are kept.
    """
    net = build_with_random_weights(spec, x.device).to(torch.bfloat16).train()
    if float8 is not None:
        for name, layer in float8_layers(net, least_width, is_compiled=compiled)[0].items():
            net.set_submodule(name, Float8Linear(layer, float8))
    objective = LanguageModelObjective(net)
    if compiled:
        for module in objective.compilable():
            module.forward = torch.compile(module.forward)
    losses: list[Tensor] = []

    def backward() -> None:
        found = objective.step((x, y), lambda loss: loss.backward())
        if len(losses) < LOSSES:
            losses.append(found["loss"].detach().clone())

    side = Side(net, backward, optimizer=our_optimizer(net, options["has_masters"]), **options)
    side.losses = losses
    return side


def our_optimizer(net: nn.Module, has_masters: bool) -> torch.optim.Optimizer:
    """AdamW as a phase steps it, so that the difference is Lightning, callbacks and monitors alone."""
    named = list(net.named_parameters())
    if not has_masters:
        return AdamW([weight for _, weight in named], lr=1e-5)
    return MasterWeights(named, lambda copies: AdamW([wide for _, wide in copies], lr=1e-5), keeps=True)
