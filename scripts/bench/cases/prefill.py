"""Seconds of the prefill of one long prompt, by layout, and of the attention of wide keys against stock backends.

Usage on a GPU: python scripts/bench/run.py prefill [--tokens 32768] [--parts model,op] [--repeats 5] [--seconds 420]
The file is written after every case. `--size tiny --device cpu --tokens 96 --chunk 32` shows that the script works.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import models
import torch
from models import prompts_of
from record import Record, Row
from registry import UsageError, check_names
from timing import device_seconds, interleave
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from caramba import kernels
from caramba.infer import Generator, prefill
from caramba.lower.lowering import lower
from caramba.model import Model
from caramba.ops import implementation
from caramba.ops.backend import without_kernels
from caramba.ops.decoupled_attention import decoupled_attention

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OP = "decoupled_attention"
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Batch, queries, keys, heads, and widths of both key parts and of a value.

    The geometric key has one head.

    `trains`: forward and backward are timed, in place of the forward alone. `is_absorbed`: all of a key and the value
    are of one head, as in the cache of a latent layer.
    """

    name: str
    batch: int
    n_queries: int
    n_keys: int
    heads: int
    widths: tuple[int, int, int]
    trains: bool = False
    is_absorbed: bool = False

    @property
    def flops(self) -> float:
        """Work of the pairs that causality leaves, of the products that any implementation has to compute: two forward,
        and five backward, of which the first is the forward's."""
        sem, geo, value = self.widths
        pairs = self.n_queries * self.n_keys - self.n_queries * (self.n_queries - 1) / 2
        features = sem + geo + value + self.trains * (3 * (sem + geo) + 2 * value)
        return 2.0 * self.batch * self.heads * pairs * features

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return q, k_sem, k_geo and v, by tokens first."""
        sem, geo, value = self.widths
        generator = torch.Generator(device).manual_seed(0)

        def random_tensor(n_tokens: int, heads: int, width: int, scale: float = 1.0) -> Tensor:
            x = torch.randn(self.batch, n_tokens, heads, width, device=device, generator=generator) * scale
            return x.to(dtype).requires_grad_(self.trains)

        q = random_tensor(self.n_queries, self.heads, sem + geo, (sem + geo) ** -0.5)
        own = 1 if self.is_absorbed else self.heads
        return [q, *(random_tensor(self.n_keys, k, d) for k, d in ((own, sem), (1, geo), (own, value)))]


def shapes(size: str, tokens: int, chunk: int) -> list[Shape]:
    """Return the shapes at llama32_dba's widths.

    Training at 8 x 2048 with and without backward, the last chunk of a prompt, and a short one in absorbed form.
    """
    if size == "tiny":
        batch, block, heads, widths, latent = 2, 32, 4, (16, 48, 16), (24, 48, 24)
    else:
        batch, block, heads, widths, latent = 8, 2048, 32, (64, 256, 64), (128, 256, 128)
    whole = Shape(f"{batch} x {block}, forward", batch, block, block, heads, widths)
    behind = Shape(f"1 x {chunk} behind {tokens - chunk}, forward", 1, chunk, tokens, heads, widths)
    few = max(1, chunk // 16)
    name = f"1 x {few} behind {tokens - few}, absorbed"
    absorbed = replace(behind, name=name, n_queries=few, widths=latent, is_absorbed=True)
    return [whole, replace(whole, name=f"{batch} x {block}, both ways", trains=True), behind, absorbed]


def join_inputs(inputs: list[Tensor], *, is_padded: bool) -> list[Tensor]:
    """Return q, k and v as scaled_dot_product_attention takes them, heads first, with as many leaves for gradients."""
    q, k_sem, k_geo, v = (x.detach() for x in inputs)
    k = torch.cat((k_sem, k_geo.expand(-1, -1, k_sem.shape[2], -1)), dim=-1)
    if is_padded:
        v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    if v.shape[2] < q.shape[2]:  # without a copy
        k, v = k.expand(-1, -1, q.shape[2], -1), v.expand(-1, -1, q.shape[2], -1)
    return [x.requires_grad_(inputs[0].requires_grad).transpose(1, 2) for x in (q, k, v)]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias: Any = causal_lower_right(q.shape[2], k.shape[2]) if q.shape[2] < k.shape[2] else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=1.0)


def sides(shape: Shape, inputs: list[Tensor]) -> Iterator[tuple[str, Call, list[Tensor]]]:
    """Yield name, call and operands: ours, then every backend, with values as they are and widened to the keys.

    Joining and widening are not timed. CPUs have flash alone, which takes no lower-right bias.
    """
    yield OP, decoupled_attention, inputs
    for name, backend in BACKENDS.items():
        if inputs[0].is_cuda or (name == "flash" and shape.n_queries == shape.n_keys):
            for is_padded in (False, True):

                def attend(*operands: Tensor, backend: SDPBackend = backend) -> Tensor:
                    with sdpa_kernel([backend]):
                        return sdpa(*operands)

                yield name + ", padded" * is_padded, attend, join_inputs(inputs, is_padded=is_padded)


def once(call: Call, operands: list[Tensor], grad: Tensor | None) -> list[Tensor]:
    """Run a side: its output, and its gradients where they are wanted."""
    if grad is None:
        with torch.no_grad():
            return [call(*operands)]
    out = call(*operands)
    return [out, *torch.autograd.grad(out, operands, grad)]


def gradient_of(call: Call, operands: list[Tensor], shape: Shape) -> Tensor | None:
    """Return a gradient of a side's output, None where none is wanted."""
    if not shape.trains:
        return None
    with torch.no_grad():
        return torch.randn_like(call(*operands))


def error_of(shape: Shape, name: str, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest |got - want| / |want|, in norms, over output and gradient of queries.

    The reference is float64, on few heads and tokens of the same widths.
    """
    n_keys = min(shape.n_keys, 1024)
    small = replace(shape, batch=1, n_queries=min(shape.n_queries, n_keys // 2), n_keys=n_keys, heads=2)
    if shape.n_queries == shape.n_keys:
        small = replace(small, n_queries=n_keys)
    inputs = small.inputs(device, dtype)
    _, call, operands = next(side for side in sides(small, inputs) if side[0] == name)
    width = small.widths[2]
    grad = gradient_of(decoupled_attention, inputs, small)
    given = grad if grad is None or name == OP else grad.transpose(1, 2)
    if name.endswith("padded") and given is not None:
        given = F.pad(given, (0, operands[2].shape[-1] - width))
    got = once(call, operands, given)[:2]
    if name != OP:
        got = [got[0][..., :width].transpose(1, 2), *(x.transpose(1, 2) for x in got[1:])]
    wide = [x.detach().double().requires_grad_(small.trains) for x in inputs]
    want = once(decoupled_attention, wide, None if grad is None else grad.double())[:2]
    return max(
        float((a.double() - b).norm() / b.norm())
        for a, b in zip((x.detach() for x in got), (x.detach() for x in want), strict=True)
    )


def measure(shape: Shape, device: torch.device, repeats: int) -> list[Row]:
    """Return a row a side: median and range of milliseconds in turns, TFLOP/s and the error, or why it does not run."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs, rows = shape.inputs(device, dtype), []
    runs: dict[str, Callable[[], float]] = {}
    facts = {"shape": shape.name, "widths": list(shape.widths), "heads": shape.heads, "flops": shape.flops}
    for name, call, operands in sides(shape, inputs):
        try:
            run = functools.partial(once, call, operands, gradient_of(call, operands, shape))
            run()
            error = error_of(shape, name, device, dtype)
        except RuntimeError as refusal:
            if name == OP or isinstance(refusal, (torch.OutOfMemoryError, torch.AcceleratorError)):
                raise
            rows.append(facts | {"side": name, "refused": str(refusal).splitlines()[0]})
            continue
        runs[name] = lambda run=run: 1e3 * device_seconds(run, device)
        rows.append(facts | {"side": name, "error": error})
    times = interleave(runs, repeats=repeats, warm=1)
    for row in rows:
        if found := times.get(row["side"]):
            ms = statistics.median(found)
            row |= {"ms": ms, "all_ms": found, "tflop_s": shape.flops / ms / 1e9}
    return rows


@torch.inference_mode()
def difference(model: Model, n_tokens: int, chunk: int) -> float:
    """Return how far the last logits with the kernel are from those without it, relative, in norms."""
    device = model.embedder.token.weight.device
    tokens = torch.tensor(prompts_of(model, 1, n_tokens), device=device)

    def logits() -> Tensor:
        ctx = model.new_context(1, n_tokens, models.cache_kind(device), static=True)
        with lower(model, device, "decode"):
            return prefill(model, tokens, ctx, chunk).float()

    with without_kernels(OP):
        plain = logits()
    return float((logits() - plain).norm() / plain.norm())


def whole_models(words: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Yield a row a layout, those of two parts with the kernel and without: seconds and tokens per second, in turns."""
    sides: dict[str, Callable[[], float]] = {}
    facts: dict[str, Row] = {}

    def seconds(generator: Generator, prompt: list[list[int]]) -> float:
        """Run a prompt as our Generator does."""
        generator.generate(prompt)
        return generator.stats.prefill_s

    def plain_seconds(*given: Any) -> float:
        with without_kernels(OP):
            return seconds(*given)

    for layout in models.LAYOUTS:
        model = models.model_of(words.size, layout, device)
        keys = {"max_new_tokens": 1, "temperature": 0.0, "prefill_chunk": words.chunk, "compiled": False}
        keys |= {"max_seq_len": words.tokens + 1, "cache_kind": models.cache_kind(device)}
        given = Generator(model, None, **keys), prompts_of(model, 1, words.tokens)
        sides[layout] = functools.partial(seconds, *given)
        facts[layout] = {"layout": layout}
        if layout != "gqa":  # whose keys have one part
            joined = f"{layout}, joined keys"
            sides[joined], facts[joined] = functools.partial(plain_seconds, *given), {"layout": layout}
            facts[layout]["attends_by"] = implementation(OP, device)
            facts[layout]["difference"] = difference(model, words.tokens, words.chunk)
    for name, times in interleave(sides, repeats=words.repeats, warm=1).items():
        middle = statistics.median(times)
        row = {"side": name, "tokens": words.tokens, "chunk": words.chunk, "s": middle}
        yield row | {"all_s": times, "tok_s": words.tokens / middle} | facts[name]


PARTS = ("model", "op")
OPTIONS = "--size=1b|tiny --parts=model,op --tokens=32768 --chunk=2048 --repeats=5 --seconds=420.0"
SMOKE_OPTIONS = "--size tiny --device cpu --tokens 96 --chunk 32 --repeats 1"


def run(words: argparse.Namespace, record: Record) -> None:
    check_names("--parts", words.parts, PARTS)
    if not 0 < words.chunk < words.tokens:
        raise UsageError(f"--chunk {words.chunk}: expected less than --tokens {words.tokens}")
    kernels.load(record.device)
    record.start(size=words.size, models=[], ops=[])
    if "op" in words.parts:
        cases = [
            (f"attention, {shape.name}", lambda shape=shape: measure(shape, record.device, 4 * words.repeats))
            for shape in shapes(words.size, words.tokens, words.chunk)
        ]
        record.measure(cases, words.seconds, "ops")
    if "model" in words.parts:
        name = f"prompt of {words.tokens} tokens"
        record.measure([(name, lambda: whole_models(words, record.device))], words.seconds, "models")
