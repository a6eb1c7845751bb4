"""Bytes, decode, prefill, training and prefix reuse of memory slots, next to full attention and the window alone.

Usage on a GPU: python scripts/bench/run.py memory [--seconds 110] [--only state peak decode prefill train prefix]
The file is written after every case; what there was no time or memory for is in `left_out`, with the reason.
`--join FILE NEWER` makes one file of two, with the newer rows where both have some.

- state: bytes of a layer's cache of one sequence once it holds so many tokens
- decode: ms a token after `--contexts` tokens, `--batch` rows, of memory and of full attention, from the host and in a
  CUDA graph
- peak: allocated bytes over `--decoded` tokens after the first few, of one row and `--peak-blocks` blocks, decoded in
  a CUDA graph
- prefill: seconds of prompts of `--prompts` tokens, one row
- train: tokens/s of forward and backward, by `--compiled` (no, or modes of torch.compile, which compiles blocks), of
  memory by the queries of a chunk of its op, and of its window alone
- prefix: time to the first token of 8 turns on one prefix, with and without the memory cache
"""

from __future__ import annotations

import argparse
import functools
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import cache_kind, llama_spec
from record import Record, Row
from registry import check_names
from static_decode import StaticDecoder
from summaries import join
from timing import device_seconds, wall_seconds
from torch import Tensor
from torch.nn import functional as F

from caramba import kernels
from caramba.cache import Context, DeviceContext
from caramba.config.model import ModelSpec
from caramba.infer import prefill
from caramba.infer.device_steps import capture_graph, next_logits, replay_graph
from caramba.infer.engine import Engine
from caramba.lower.lowering import lower
from caramba.model import Model, build_model, build_with_random_weights
from caramba.model.topology import compilable_regions

OPTIONS = (
    "--size=135m|tiny --window=512 --slots=64 --batch=16 --contexts=2048,32768 --lengths=2048,8192,32768,131072 "
    "--decoded=32768 --prompts=8192,32768 --rows=8 --tokens=2048 --chunk=32 --chunks=16,32 "
    "--compiled=no,default,reduce-overhead "
    "--prefix=8192 --steps=32 --peak-blocks=1 --seconds=110 --only=* --join=*"
)
SMOKE_OPTIONS = (
    "--size tiny --window 8 --slots 4 --batch 2 --contexts 24,48 --lengths 32,64 --decoded 40 --prompts 32,64 --rows 2 "
    "--tokens 32 --chunk 4 --chunks 4,8 --compiled no --prefix 64 --steps 2"
)
PARTS = ("state", "train", "decode", "prefill", "prefix", "peak")
KEYS = ("case", "side", "chunk", "compiled", "context", "tokens", "memory_cache")
TURNS, ANSWER, PIECE = 8, 4, 512


def spec_of(size: str, attention: Row, blocks: int | None = None) -> ModelSpec:
    """Return a model of Llama blocks whose attention has these further keys."""
    return ModelSpec.model_validate(llama_spec(size, {"mode": "gqa", **attention}, blocks))


class Sides:
    """The models that are compared, of random weights: speed does not depend on the text."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.dtype, self.kind = torch.bfloat16 if device.type == "cuda" else torch.float32, cache_kind(device)

    def model(self, side: str, chunk: int | None = None, blocks: int | None = None) -> Model:
        """Return `memory`, `window` or `full`, in 16 bits on a GPU."""
        window = {"type": "AttentionLayer", "local_window": self.options.window}
        attention = {
            "memory": window | {"type": "MemoryBankLayer", "memory_slots": self.options.slots, "q_chunk": chunk},
            "window": window,
            "full": {"type": "AttentionLayer"},
        }[side]
        model = build_with_random_weights(spec_of(self.options.size, attention, blocks), self.device)
        return model.to(self.dtype).eval()

    def tokens(self, model: Model, rows: int, n: int) -> Tensor:
        return torch.randint(model.spec.embedder.vocab_size, (rows, n), device=self.device)

    def context(self, model: Model, rows: int, n: int) -> Context:
        return model.new_context(rows, n, self.kind, static=True)

    @torch.inference_mode()
    def filled(self, model: Model, rows: int, n: int, room: int) -> Context:
        """Return a context of `n` random tokens with room for more."""
        ctx = self.context(model, rows, n + room)
        prefill(model, self.tokens(model, rows, n), ctx, PIECE)
        return ctx


@torch.inference_mode()
def state(sides: Sides) -> Iterator[Row]:
    """Bytes of a cache after so many tokens; full attention's by its shapes, without memory."""
    memory = sides.model("memory", sides.options.chunk, 1)
    full = build_model(spec_of(sides.options.size, {"type": "AttentionLayer"}, 1), device="meta")
    ctx, done = sides.context(memory, 1, max(sides.options.lengths)), 0
    for length in sorted(sides.options.lengths):
        prefill(memory, sides.tokens(memory, 1, length - done), ctx, PIECE)
        done = length
        theirs = full.new_context(1, length, sides.kind, static=True).nbytes()
        yield {"tokens": length, "bytes_per_layer": ctx.nbytes(), "full_bytes_per_layer": theirs}


def train(sides: Sides) -> Iterator[Row]:
    options, window = sides.options, 0.0
    shapes = [("window", None), *(("memory", chunk) for chunk in options.chunks)]
    for mode, (side, chunk) in itertools.product(options.compiled, shapes):
        model = sides.model(side, chunk).train()
        torch._dynamo.reset()
        for region in compilable_regions(model.topology) if mode != "no" else ():
            region.forward = torch.compile(region.forward, mode=mode)
        tokens = sides.tokens(model, options.rows, options.tokens)

        def step(model: Model = model, tokens: Tensor = tokens) -> None:
            model.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            logits = model(tokens)[:, :-1].flatten(0, 1)
            F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()

        step()
        seconds = statistics.median(device_seconds(step, sides.device) for _ in range(3))
        window = seconds if side == "window" else window
        yield {
            "side": side,
            "chunk": chunk,
            "compiled": mode,
            "tokens_per_s": tokens.numel() / seconds,
            "over_window": window / seconds,
        }


@torch.inference_mode()
def decode(sides: Sides) -> Iterator[Row]:
    """Steps from the host, and as a captured graph: full attention's is that of a plain loop with a static cache."""
    options = sides.options
    makers = {
        "memory": host_steps,
        "memory_graph": memory_graph_steps,
        "full": host_steps,
        "full_graph": full_graph_steps,
    }
    for side, make in makers.items():
        model = sides.model(side.removesuffix("_graph"), options.chunk)
        for length in options.contexts:
            turn = make(sides, model, length)
            turn()
            seconds = device_seconds(turn, sides.device) / options.steps
            yield {"side": side, "context": length, "ms_per_token": 1e3 * seconds}


def host_steps(sides: Sides, model: Model, length: int) -> Callable[[], None]:
    rows, n_steps = sides.options.batch, sides.options.steps
    ctx, token = sides.filled(model, rows, length, 2 * n_steps), sides.tokens(model, rows, 1)

    def turn() -> None:
        for _ in range(n_steps):
            model(token, ctx)

    return turn


def memory_graph_steps(sides: Sides, model: Model, length: int) -> Callable[[], None]:
    return graph_steps(sides, model, sides.options.batch, length, 2 * sides.options.steps)


def graph_steps(sides: Sides, model: Model, rows: int, length: int, room: int) -> Callable[[], None]:
    """Greedy steps on a `DeviceContext`, captured as `caramba generate` does; on a CPU one after the other."""
    n_steps = sides.options.steps
    lower(model, sides.device, "decode", is_compiled=False)
    step = DeviceContext(sides.filled(model, rows, length, room))
    token = sides.tokens(model, rows, 1)[:, 0]

    def trial(given: Tensor) -> Tensor:
        step.device_lengths.fill_(length)
        return next_logits(model, given, step)

    def run(given: Tensor) -> Tensor:
        logits = next_logits(model, given, step)
        given.copy_(logits.argmax(-1))
        return logits

    graph = None
    if sides.device.type == "cuda":
        graph = capture_graph(token, run, trial, in_place=True)
        step.device_lengths.fill_(length)

    def turn() -> None:
        for _ in range(n_steps):
            step.advance()
            run(token) if graph is None else replay_graph(graph, token)

    return turn


def full_graph_steps(sides: Sides, model: Model, length: int) -> Callable[[], None]:
    rows, n_steps = sides.options.batch, sides.options.steps
    decoder = StaticDecoder(model, rows, length + 2 * n_steps, is_compiled=False)
    decoder.at.fill_(length)
    decoder.capture()
    return functools.partial(decoder.run, n_steps)


def peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.inference_mode()
def peak(sides: Sides) -> Iterator[Row]:
    """Highest allocation over all decoded tokens above that of the first few; on a CPU the process's."""
    model, options = sides.model("memory", blocks=sides.options.peak_blocks), sides.options
    first, on_gpu = options.window + PIECE, sides.device.type == "cuda"
    turn = graph_steps(sides, model, 1, first, options.decoded)

    def bytes_after_turn() -> int:
        turn()
        return torch.cuda.max_memory_allocated() if on_gpu else peak_resident_bytes()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began, done, before = time.monotonic(), options.steps, bytes_after_turn()
    after = before
    while done < options.decoded and time.monotonic() - began < options.seconds / 2:
        after, done = bytes_after_turn(), done + options.steps
    yield {
        "decoded": done,
        "asked": options.decoded,
        "bytes": before,
        "peak_bytes": after,
        "rise": after / before - 1,
    }


@torch.inference_mode()
def prompts(sides: Sides) -> Iterator[Row]:
    for side in ("memory", "full"):
        model = sides.model(side, sides.options.chunk)
        for length in sides.options.prompts:
            tokens = sides.tokens(model, 1, length)

            def call(model: Model = model, tokens: Tensor = tokens) -> None:
                prefill(model, tokens, sides.context(model, 1, tokens.shape[1]), PIECE)

            if length == sides.options.prompts[0]:
                call()
            yield {"side": side, "tokens": length, "seconds": wall_seconds(call, sides.device)}


def prefix(sides: Sides) -> Iterator[Row]:
    """Turns of one conversation: its prefix, then each question after the earlier answers. Another text runs before."""
    model, n = sides.model("memory", sides.options.chunk), sides.options.prefix
    vocab = model.spec.embedder.vocab_size
    for keeps in (False, True):
        longest = n + TURNS * (ANSWER + 16)
        kept: dict[str, Any] = {"use_memory_cache": True, "cache_size": 4096.0} if keeps else {}
        engine = Engine(model, n_slots=1, max_len=longest, prefill_chunk=PIECE, **kept)
        text = [(7 * place) % vocab for place in range(n)]
        engine.submit([(5 + 3 * place) % vocab for place in range(min(n, PIECE))], max_new_tokens=ANSWER)
        while engine.step():
            pass
        seconds = []
        for turn in range(TURNS):
            began = time.perf_counter()
            ticket = engine.submit(text, max_new_tokens=ANSWER, temperature=0.0)
            while not ticket.tokens:
                engine.step()
            seconds.append(time.perf_counter() - began)
            while engine.step():
                pass
            text = [*text, *ticket.tokens, *((turn + place) % vocab for place in range(8))]
        later = statistics.mean(seconds[1:])
        yield {
            "memory_cache": keeps,
            "first_s": seconds[0],
            "later_mean_s": later,
            "mean_s": statistics.mean(seconds),
        }


def run(options: argparse.Namespace, record: Record) -> None:
    if options.join:
        join(record, options.join, equal=("sizes",), by=KEYS)
        record.save(summary=summarise(record.data["rows"], options))
        return
    chosen = options.only or list(PARTS)
    check_names("--only", chosen, PARTS)
    kernels.load(record.device)
    sides = Sides(options, record.device)
    sizes = {key: getattr(options, key) for key in ("size", "window", "slots", "batch", "rows", "tokens")}
    record.start(sizes=sizes)
    measures = dict(zip(PARTS, (state, train, decode, prompts, prefix, peak), strict=True))
    cases: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        (name, functools.partial(measures[name], sides)) for name in PARTS if name in chosen
    ]
    record.measure(cases, options.seconds)
    record.save(summary=summarise(record.data["rows"], options))


def summarise(rows: list[Row], options: argparse.Namespace) -> Row:
    """Return the ratios that matter, None for what was not measured."""

    def values(case: str, key: str, *by: str) -> dict[Any, float]:
        of_case = (row for row in reversed(rows) if row["case"] == case)
        return {tuple(row[name] for name in by): row[key] for row in of_case}

    def ratio(found: dict[Any, float], over: Any, under: Any) -> float | None:
        return found[over] / found[under] if over in found and found.get(under) else None

    states = {row["bytes_per_layer"] for row in rows if row["case"] == "state"}
    steps = values("decode", "ms_per_token", "side", "context")
    prompts = values("prefill", "seconds", "side", "tokens")
    trained = [row for row in rows if row["case"] == "train" and row["side"] == "memory"]
    best = {
        mode: max((row["over_window"] for row in trained if row["compiled"] == mode), default=None)
        for mode in options.compiled
    }
    near, far = options.contexts[0], options.contexts[-1]
    side = "memory_graph" if ("memory_graph", far) in steps else "memory"
    longest, shortest = ("memory", options.prompts[-1]), ("memory", options.prompts[0])
    return {
        "state_is_constant": len(states) == 1 if states else None,
        "peak_rise": values("peak", "rise").get(()),
        "decode_far_over_near": ratio(steps, (side, far), (side, near)),
        "decode_full_over_memory": ratio(steps, ("full", far), ("memory", far)),
        "decode_full_graph_over_memory": ratio(steps, ("full_graph", far), (side, far)),
        "prefill_long_over_short": ratio(prompts, longest, shortest),
        "train_over_window": best,
        "first_token_speedup": ratio(values("prefix", "mean_s", "memory_cache"), (False,), (True,)),
    }
