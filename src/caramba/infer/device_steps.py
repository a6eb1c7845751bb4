"""Decode steps that run by themselves on the device: compiled, or captured once in a CUDA graph and replayed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from caramba.cache import Context, DeviceContext, refusal
from caramba.config.generate import Compiled, GenerateConfig
from caramba.infer.decode import decode_step
from caramba.infer.step import StepState
from caramba.layer import AttentionLayer
from caramba.lower.norm_linear import are_unmodified
from caramba.model import Model
from caramba.ops import has_kernel, implementation
from caramba.ops.backend import REFERENCE
from caramba.ops.dba_decode import kernel_takes
from caramba.runtime import get_world_size, is_distributed

WARM_UPS = 3
"""Runs before a capture, in which libraries choose and allocate what a graph may not."""
CAPTURING = threading.Lock()
"""Lock of a capture: a process runs one at a time."""
DecodeForm = Literal["eager", "compiled", "graph", "compiled graph"]

NextLogits = Callable[[Model, Tensor, Any], Tensor]
Captured = tuple[torch.cuda.CUDAGraph, Tensor, Tensor]
"""A graph with its own input and output."""


@dataclass
class EagerDecoder:
    """Steps that the host drives, one kernel after the other, on any cache."""

    model: Model
    state: StepState
    ctx: Context
    config: GenerateConfig

    def resume(self) -> None:
        """Do nothing: the context is read at every step."""

    def choose(self, logits: Tensor) -> Tensor:
        """Draw every row's token. Shape: [B, V] to [B]."""
        return self.state.choose(logits, self.config)

    def forward(self, token: Tensor) -> Tensor:
        """Return the logits after a token. Shape: [B] to [B, V]."""
        return decode_step(self.model, token, self.ctx)


class DeviceDecoder:
    """Steps on a cache whose length the device counts.

    Compiled, a forward is one graph of fused kernels. Captured, a forward and the draw behind it are one CUDA graph,
    made in the first call, which feeds itself: the host launches one thing per token and nothing is allocated. A replay
    waits some 10 us before its first kernel, so that two a token took longer. `captures` counts graphs.
    """

    def __init__(self, host: EagerDecoder, *, is_compiled: bool, is_captured: bool) -> None:
        self.host, self.step = host, DeviceContext(host.ctx)
        self.is_captured, self.is_compiled = is_captured, is_compiled
        self.run: NextLogits = next_logits
        if is_compiled:
            self.run = compile_logits(host.model, self.step.device_lengths.shape[0], *form_of(host.model, host.ctx))
            find_angles(host.model, self.step)
            for buffer in (one for cache in host.ctx.caches for one in cache.memory):
                torch._dynamo.maybe_mark_dynamic(buffer, 2)  # one graph serves every length bucket
        self.captures = 0
        self._graphs: dict[bool, Captured] = {}
        """By whether all rows begin at one place, where a draw takes fewer kernels."""

    def resume(self) -> None:
        """Continue from the context's position: the device counts from there."""
        self.step.sync_from_host()

    def choose(self, logits: Tensor) -> Tensor:
        """Sample every row's token, or return what a captured forward has sampled. Shape: [B, V] to [B]."""
        graph = self._graphs.get(self.host.state.is_level)
        return self.host.choose(logits) if graph is None or logits is not graph[2] else graph[1]

    def forward(self, token: Tensor) -> Tensor:
        """Return the logits after a token. Shape: [B] to [B, V].

        Raises:
            CacheFull: no place for it.
        """
        position = self.host.ctx.position
        self.step.advance()
        if not self.is_captured:
            return self._forward(token)
        graph = self._graphs.get(self.host.state.is_level)
        if graph is None:
            graph = self._graphs[self.host.state.is_level] = self._captured(token, position)
        return replay_graph(graph, token)

    def _captured(self, token: Tensor, position: int) -> Captured:
        host, tried = self.host, replace(self.host.state, **_copies(self.host.state))

        def trial(given: Tensor) -> Tensor:
            # At this token's own place each time: the one behind it may be beyond what the model has positions for.
            self.step.device_lengths.fill_(position)
            logits = self._forward(given)
            tried.choose(logits, host.config, given.clone())
            return logits

        def run(given: Tensor) -> Tensor:
            logits = self._forward(given)
            host.state.choose(logits, host.config, given)
            return logits

        self.captures += 1
        graph = capture_graph(token, run, trial)
        self.step.device_lengths.fill_(position)
        return graph

    def _forward(self, token: Tensor) -> Tensor:
        return self.run(self.host.model, token, self.step)


Steps = EagerDecoder | DeviceDecoder
"""A draw and a forward, one after the other; what each returns may be overwritten by its next call.

The output of a forward is sampled next, once: a captured one has done it. `resume` comes after anything else has
changed the context.
"""


def next_logits(model: Model, token: Tensor, step: Context | DeviceContext) -> Tensor:
    """Run one token per sequence and return the logits of the next. Shape: token [B] int64 to [B, V]."""
    return model.logits(model.hidden(token.unsqueeze(1), step).select(1, -1))


def find_angles(model: Model, step: DeviceContext) -> None:
    """Let compiled steps make the angles of all layers at once, where kernels read them from memory: where a compiler
    fuses rotations each layer's are a part of them."""
    if has_kernel("absorbed_queries", model.embedder.token.weight):
        step.separate_ropes = model.ropes_apart()


_compiled: WeakKeyDictionary[Model, dict[tuple[object, ...], NextLogits]] = WeakKeyDictionary()


def compile_logits(model: Model, batch_size: int, *form: object, run: NextLogits | None = None) -> NextLogits:
    """Return `run`, `next_logits` unless given, compiled whole for a model and batch size, made once: a second
    generation compiles nothing. `form` is what else a graph depends on, the cache's format and windows among it.

    Each has a code object of its own: torch.compile counts recompilations, and guesses which sizes vary, by code
    object, and other models or batches are no recompilations of this one.
    """
    made = _compiled.setdefault(model, {})
    plain = run or next_logits
    key = (plain.__name__, batch_size, *form)
    if key not in made:
        own = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
        # Rows of several tokens are no single row.
        options = compile_options(model, batch_size) if run is None else None
        made[key] = torch.compile(own, fullgraph=True, options=options)
    return made[key]


def compile_options(model: Model, batch_size: int) -> dict[str, str | int | bool | Callable[..., Any]] | None:
    """Return the options of Inductor that differ from its defaults.

    On CUDA a product with one row becomes a reduction that Inductor writes and tunes: it reads the weights at more of
    the memory's rate than the library's product, and takes in norms and gates before it and sums behind it. That takes
    long to compile, and is nothing to steps whose products `small_batch_linear` takes.
    """
    weight = model.embedder.token.weight
    if batch_size > 1 or weight.device.type != "cuda":
        return None
    by_rows = has_kernel("small_batch_linear", weight) and all(
        are_unmodified((layer.out,), weight.dtype) for _, layer in model.attention_layers()
    )
    return None if by_rows else {"coordinate_descent_tuning": True}


def form_of(model: Model, ctx: Context) -> tuple[object, ...]:
    """Return what graphs of steps depend on besides the batch: formats of the caches, and windows."""
    kinds = ((type(cache).__name__, str(cache.kind)) for cache in ctx.caches)
    return (*kinds, *(layer.score.window for layer in model.modules() if isinstance(layer, AttentionLayer)))


def captures_of(steps: object) -> int:
    """Return how many CUDA graphs steps have captured."""
    return getattr(steps, "captures", 0)


def compilations() -> int:
    """Return how many graphs torch.compile has made in this process; loads nothing where it has made none."""
    loaded = sys.modules.get("torch._dynamo.utils")
    return 0 if loaded is None else loaded.counters["stats"]["unique_graphs"]


def capture_graph(
    given: Tensor,
    run: Callable[[Tensor], Tensor],
    trial: Callable[[Tensor], Tensor],
    pool: Any = None,
    on: torch.cuda.Stream | None = None,
    *,
    in_place: bool = False,
) -> Captured:
    """Capture `run` in a CUDA graph after some runs of `trial`; return it with its own input and output. `in_place` it
    reads `given` itself, which stays where it is and which neither of the two changes.

    Graphs of one `pool` share the memory between input and output, and may not be replayed at once; nor may those that
    were captured on one stream, which is the same for all unless one is given by `on`.
    """
    fixed = given if in_place else given.clone()
    warm_up(trial, fixed)
    graph = torch.cuda.CUDAGraph()
    # A capture that fails may leave its own stream the current one.
    stream = torch.cuda.stream(torch.cuda.current_stream(given.device))
    with CAPTURING, torch.cuda.device_of(given), stream, torch.cuda.graph(graph, pool=pool, stream=on):
        out = run(fixed)
    return graph, fixed, out


def warm_up(trial: Callable[[Tensor], Tensor], given: Tensor) -> None:
    """Run what is to be captured `WARM_UPS` times, on a stream of its own."""
    side = torch.cuda.Stream(given.device)
    side.wait_stream(torch.cuda.current_stream(given.device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            trial(given)
    torch.cuda.current_stream(given.device).wait_stream(side)


def replay_graph(graph: Captured, given: Tensor) -> Tensor:
    """Replay a graph on an input, which may be its own, and return its output, which the next replay overwrites.

    An input in pinned memory is copied without a wait.
    """
    if given is not graph[1]:
        graph[1].copy_(given, non_blocking=True)
    graph[0].replay()
    return graph[2]


def resolve_form(compiled: Compiled, device: torch.device) -> tuple[DecodeForm, str | None]:
    """Return the form of steps that `GenerateConfig.compiled` asks for on a device, and why not a graph.

    The reason is None unless a graph was requested, or `auto` would take one. A model may still refuse the form.
    """
    is_cuda = device.type == "cuda"
    if compiled is True:
        return ("compiled graph" if is_cuda else "compiled"), None
    if compiled is False or (compiled == "auto" and not is_cuda):
        return "eager", None
    if not is_cuda:
        return "eager", f"CUDA graphs need a CUDA device, the model is on {device.type}"
    if compiled == "auto" and is_distributed():
        return "eager", f"{get_world_size()} ranks take part, and auto captures the steps of one alone"
    return "graph", None


def choose_steps(host: EagerDecoder) -> tuple[Steps, DecodeForm, str | None]:
    """Return the steps that the config asks for, their form, and why it is not the requested one."""
    form, reason = resolve_form(host.config.compiled, host.state.tokens.device)
    if form != "eager":
        reason = step_refusal(host.model, host.ctx)
    if form == "eager" or reason is not None:
        return host, "eager", reason
    return DeviceDecoder(host, is_compiled="compiled" in form, is_captured="graph" in form), form, None


def step_refusal(model: Model, ctx: Context, *, is_ragged: bool = False, has_slots: bool = False) -> str | None:
    """Return why a model's steps on a context cannot run by themselves on the device, None where they can."""
    refused = refusal(ctx, is_ragged=is_ragged, has_slots=has_slots)
    if refused is not None:
        return refused
    weight = model.embedder.token.weight
    widths = [tensor.width for cache in ctx.caches for tensor in cache.tensors.values()]
    has_own_kernels = widths and implementation("dba_decode", weight.device) != REFERENCE
    if has_own_kernels and not kernel_takes(weight.dtype, widths):
        return f"the kernels take no heads of {max(widths)} in {weight.dtype}"
    limit = DeviceContext(ctx, is_ragged=is_ragged).limit
    reasons = (layer.projection.step_refusal(limit) for _, layer in model.attention_layers())
    return next((reason for reason in reasons if reason is not None), None)


def _copies(state: StepState) -> dict[str, Tensor]:
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}


WORTH_THREADS = 1 << 22
"""Multiplications of a step from which it is shared out: below, each of its products ends before threads meet, and
where another process has a core they wait for it at every one."""


def n_weights_of(model: Model) -> int:
    """Return how many weights a model has, what one row of a step multiplies by."""
    return sum(weight.numel() for weight in model.parameters())


@contextlib.contextmanager
def step_threads(model: Model, n_rows: int, n_weights: int | None = None) -> Iterator[None]:
    """Run decode steps of `n_rows` rows with one thread if they are small; restore the count after.

    Pass `n_weights` when calling per step; counting is slow.
    """
    n_threads = torch.get_num_threads()
    is_alone = n_threads == 1 or model.embedder.token.weight.device.type != "cpu"
    if is_alone or n_rows * (n_weights_of(model) if n_weights is None else n_weights) >= WORTH_THREADS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
