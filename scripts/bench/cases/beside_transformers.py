"""A caramba model and transformers' LlamaForCausalLM of the same shape and weights, compiled, measured in turns."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from timing import device_seconds
from torch import Tensor, nn

from caramba.config.model import ModelSpec
from caramba.distill import cross_entropy
from caramba.export.llama import llama_config, llama_tensors
from caramba.launch.freeze import freeze
from caramba.model import Model, build_model, init_weights

SIDES = ("caramba", "transformers")
WARM_CALLS = 3
# Largest relative difference of the two models' logits on the same weights: rounding, and nothing else.
LOGITS_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 8e-2}


def pin_sdpa(backend: str) -> None:
    """Leave one backend of scaled_dot_product_attention, for both sides; `auto` leaves all."""
    if backend == "auto":
        return
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(backend == "flash")
    cuda.enable_cudnn_sdp(backend == "cudnn")
    cuda.enable_mem_efficient_sdp(backend == "efficient")
    cuda.enable_math_sdp(False)


def rely_on_is_causal() -> None:
    """Give the peer its fastest path: no mask where there is no padding.

    While it is compiled with torch below 2.14, transformers builds a causal mask all the same, with which SDPA cannot
    take the flash or cuDNN kernel. That both sides still compute the same is checked on their logits and losses.
    """
    from transformers.models.llama import modeling_llama

    if not hasattr(modeling_llama, "create_causal_mask"):
        raise SystemExit(f"transformers {transformers.__version__} makes its causal mask in another place")
    vars(modeling_llama)["create_causal_mask"] = lambda *args, **kwargs: None


def both_models(spec: ModelSpec, device: str, dtype: torch.dtype) -> tuple[Model, nn.Module]:
    """Return caramba's model with fresh weights and a LlamaForCausalLM with the same ones."""
    torch.manual_seed(0)
    ours = build_model(spec, device="meta").to(dtype).to_empty(device=device)
    init_weights(ours)
    keys = llama_config(spec, max_positions=131072, eos_id=None, dtype=str(dtype).removeprefix("torch."))
    keys = {key: value for key, value in keys.items() if key not in ("architectures", "model_type", "dtype")}
    with torch.device(device):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**keys), dtype=dtype, attn_implementation="sdpa"
        )
    result = theirs.load_state_dict(llama_tensors(ours), strict=False)
    theirs.tie_weights()
    if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"the two models have other tensors: {result}")
    sizes = [sum(item.numel() for item in model.parameters()) for model in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise SystemExit(f"the two models have {sizes} parameters")
    return ours, theirs


def logits_error(ours: nn.Module, theirs: nn.Module, tokens: Tensor) -> float:
    """Return |a - b| / |b| over the logits of both, uncompiled."""
    with torch.no_grad():
        a, b = ours(tokens).double(), theirs(input_ids=tokens, use_cache=False).logits.double()
    return float((a - b).norm() / b.norm())


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int, device: str, tokens: int) -> dict[str, Any]:
    """Measure each side `repeats` times in turns, after warm calls that also compile."""
    compile_s = {}
    for name, call in calls.items():
        began = time.perf_counter()
        for _ in range(WARM_CALLS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        compile_s[name] = time.perf_counter() - began
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in sorted(calls, reverse=bool(turn % 2)):
            seconds[name].append(device_seconds(calls[name], torch.device(device)))
    result: dict[str, Any] = {}
    for name, values in seconds.items():
        spread = statistics.quantiles(values, n=5, method="inclusive")
        result[name] = {
            "median_ms": 1000 * statistics.median(values),
            "p20_ms": 1000 * spread[0],
            "p80_ms": 1000 * spread[-1],
            "tokens_per_s": tokens / statistics.median(values),
            "warm_up_s": compile_s[name],
        }
    pairs = [a / b for a, b in zip(seconds["caramba"], seconds["transformers"], strict=True)]
    return result | {"caramba_over_transformers": statistics.median(pairs)}


class Side:
    """One of the two models with its compiled forward, its compiled loss, and an optimizer."""

    def __init__(
        self, name: str, net: nn.Module, batch: tuple[Tensor, Tensor], autocast: Any, compiled: bool
    ):
        self.net, self.autocast = net, autocast
        self.x, self.y = batch
        self.is_ours = name == "caramba"
        self.first_losses: list[float] = []
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        self.compile_logits: Callable[..., Tensor] = self._logits
        self.compiled_loss: Callable[..., Tensor] = self._loss
        if compiled:
            # Of caramba's model a graph break is an error.
            self.compile_logits = torch.compile(self._logits, fullgraph=self.is_ours, dynamic=False)
            self.compiled_loss = torch.compile(self._loss, fullgraph=self.is_ours, dynamic=False)

    def _logits(self, tokens: Tensor) -> Tensor:
        return self.net(tokens) if self.is_ours else self.net(input_ids=tokens, use_cache=False).logits

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self._logits(tokens), targets)

    def forward(self) -> None:
        """Score the batch, without gradients."""
        with torch.no_grad(), self.autocast():
            self.compile_logits(self.x)

    def step(self) -> None:
        """Run forward, backward and AdamW."""
        with self.autocast():
            loss = self.compiled_loss(self.x, self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if len(self.first_losses) < WARM_CALLS:
            self.first_losses.append(loss.item())


def measure(
    *,
    model: str,
    device: str,
    precision: str,
    sdpa: str,
    batch: int,
    length: int,
    repeats: int,
    compiled: bool,
) -> dict[str, Any]:
    """Measure a forward without gradients and a whole training step (forward, backward, AdamW) of both sides."""
    pin_sdpa(sdpa)
    rely_on_is_causal()
    spec = freeze([f"model={model}", "train=pretrain"]).manifest.model
    ours, theirs = both_models(spec, device, torch.bfloat16 if precision == "bf16" else torch.float32)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(spec.embedder.vocab_size, (batch, length + 1), generator=generator).to(device)
    x, y = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def autocast() -> Any:
        return torch.autocast(device, torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()

    with autocast():
        error = logits_error(ours, theirs, x[:1, :256])
    limit = LOGITS_LIMIT[torch.float32 if precision == "fp32" else torch.bfloat16]
    if not error < limit:
        raise SystemExit(
            f"the two models' logits differ by {error:.2g} of their size, the limit is {limit:g}"
        )
    nets = dict(zip(SIDES, (ours, theirs), strict=True))
    sides = {name: Side(name, net, (x, y), autocast, compiled) for name, net in nets.items()}
    result: dict[str, Any] = {}
    for what in ("forward", "step"):
        for net in nets.values():
            net.train(what == "step")
        calls = {name: getattr(side, what) for name, side in sides.items()}
        result["training_step" if what == "step" else what] = in_turns(calls, repeats, device, x.numel())
    losses = {name: side.first_losses for name, side in sides.items()}
    gap = max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True))
    if not gap < limit:
        raise SystemExit(f"the two sides train to other losses: {losses}")
    about = {
        "model": model,
        "precision": precision,
        "sdpa": sdpa,
        "batch": batch,
        "tokens": length,
        "compiled": compiled,
        "transformers": transformers.__version__,
    }
    return about | {"logits_relative_error": error, "first_losses": losses, **result}
