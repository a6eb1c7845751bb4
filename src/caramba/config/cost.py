"""What a node costs, by its schema: widths, parameters, matrix and attention work, cache, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from caramba.config.kvcache import EXACT_BYTES, KVCacheKind, Streams, bytes_of_streams

Unknown = Literal["flops", "activations", "cache"]
MOST_RUNS = 100_000
"""Layers that one forward runs, repeats included. A model of 126 blocks runs under 1,000."""


@dataclass(frozen=True)
class Width:
    """Features of an activation: (B, T, d_model), or (B, T, stack, d_model) after a ParallelTopology."""

    d_model: int
    stack: int | None = None

    def __str__(self) -> str:
        return f"[B,T,{self.d_model}]" if self.stack is None else f"[B,T,{self.stack},{self.d_model}]"

    @property
    def features(self) -> int:
        """Elements per token, the whole stack together."""
        return self.d_model * (self.stack or 1)

    @property
    def label(self) -> str:
        """The width as an error message names it."""
        return str(self.d_model) if self.stack is None else f"a stack of {self.stack} x {self.d_model}"


class WidthError(Exception):
    """A node was given a width that it cannot take, or gave one that its container cannot.

    `path` leads from the node whose `infer` was called to the failing one. `source` is the node that produced
    the wrong width, relative to the same node; None means that it came in from outside; `inside` fills it in.
    """

    def __init__(self, message: str, got: str, fix: str, path: tuple[str, ...] = (), source: str | None = None) -> None:
        super().__init__(message, got, fix, path, source)
        self.message, self.got, self.fix, self.path, self.source = message, got, fix, path, source

    def inside(self, step: str, previous: str | None = None) -> WidthError:
        """Return this error as the container sees it: `step` is the child, `previous` what feeds it."""
        source = f"{step}.{self.source}" if self.source is not None else previous
        return type(self)(self.message, self.got, self.fix, (step, *self.path), source)

    def __str__(self) -> str:
        return f"{self.message}, got {self.got} from {self.source or 'the embedder'}; {self.fix}"


class TooManyRuns(WidthError):  # noqa: N818 - names the fault
    """A node runs more layers than a forward may."""

    def __str__(self) -> str:
        return f"{self.message}, got {self.got}; {self.fix}"


@dataclass(frozen=True)
class AttentionWork:
    """Score and value work of one attention application.

    `width` is H * (qk + v), per head; `window` the most tokens whose keys a query may see, its own included;
    `null` the keys that belong to no token and that every query sees besides. `forward_width` is the width where
    a sequence of two or more tokens runs in one forward, None when that is the width of a decode too. The `first`
    tokens of a sequence go through `first_weights` of their own and are seen at `first_width`; the queries after them
    see one key of `width` besides that represents them. `forward_weights` multiply one row per such forward, whatever
    its length: those that expand a null latent to every head.
    """

    width: int
    window: int | None = None
    null: int = 0
    forward_width: int | None = None
    first: int = 0
    first_width: int = 0
    first_weights: int = 0
    forward_weights: int = 0

    def mean_keys(self, context: int) -> Fraction:
        """Mean number of keys that a causal query sees over positions 1..context.

        Its own key and null count, those of the first tokens do not.
        """
        after = max(context - self.first, 0)
        seen = min(after, self.window or after)
        standing_in = after if self.first else 0
        return self.null + Fraction(seen * (seen + 1) // 2 + (after - seen) * seen + standing_in, context)

    def first_flops(self, context: int) -> Fraction:
        """FLOPs per token of the first tokens' own projections, scores and values, over positions 1..context."""
        n = min(context, self.first)
        pairs = n * (n + 1) // 2 + (context - n) * n
        return Fraction(2 * (pairs * self.first_width + n * self.first_weights), context)


@dataclass(frozen=True)
class Cost:
    """One node of a cost tree; every number includes the children.

    Attributes:
        label: what distinguishes the node, for people.
        params: trainable elements; weights that are shared over applications count once.
        matmul_params_used: weights that multiply activations, per token, once per application.
        attention: score and value work, one entry per attention application in execution order.
        kv: cached streams (name, heads, width per head), one entry per attention application, same order.
        kv_first: tokens and streams of which only a sequence's first tokens are cached, of the applications that
            keep any; a constant per sequence, not part of any figure per token.
        state_bytes: bytes of a sequence besides its tokens, whatever its length: memory slots.
        copied_params: elements of a leaf that surgery takes from the teacher as they are.
        activation_elements: elements kept per token for the backward pass, summed over what autograd saves:
            each matrix product and norm keeps its input (one tensor where several read the same one), a norm
            its statistics (RMSNorm, unfused, the normalised input too), a gated feed-forward its gate,
            silu(gate), up and product, attention its q, k, v, output and log-sum-exp, dropout its mask.
            Attention probabilities are absent because SDPA recomputes them; sums and stacks keep nothing.
            Temporaries within a kernel are not counted.
        spared_elements: how many of `activation_elements` are not kept where a kernel attends to keys in two parts.
        repeat: how often the children run; `shared` tells whether every time with the same weights.
        runs: how many layers a forward runs.
        unknown: what a person's own layers do not declare, as (`flops`, `activations` or `cache`, type of layer); the
            numbers of that kind leave these layers out, and are to be shown as no more than a lower bound.
    """

    label: str
    type: str
    width_in: Width
    width_out: Width
    params: int
    matmul_params_used: int
    attention: tuple[AttentionWork, ...] = ()
    kv: tuple[Streams, ...] = ()
    kv_first: tuple[tuple[int, Streams], ...] = ()
    state_bytes: int = 0
    activation_elements: int = 0
    spared_elements: int = 0
    copied_params: int = 0
    children: tuple[Cost, ...] = ()
    repeat: int = 1
    shared: bool = False
    runs: int = 1
    unknown: frozenset[tuple[Unknown, str]] = frozenset()

    def undeclared(self, kind: Unknown) -> tuple[str, ...]:
        """Return the types of the layers that do not declare their work, what backward needs, or their cache."""
        return tuple(sorted(name for what, name in self.unknown if what == kind))

    @property
    def attention_width(self) -> int:
        """Sum of H * (qk + v) over attention calls. A query of S keys costs 2 * S FLOPs times it."""
        return sum(work.width for work in self.attention)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that all caches together store per token."""
        return sum(heads * width for streams in self.kv for _, heads, width in streams)

    def kv_bytes_per_layer(self, kind: KVCacheKind) -> tuple[Fraction, ...]:
        """Exact bytes that one more token adds to each cache, in execution order, block scales included."""
        return tuple(bytes_of_streams(streams, kind) for streams in self.kv)

    def kv_bytes_per_token(self, kind: KVCacheKind) -> Fraction:
        """Exact bytes that one more token adds to all caches together."""
        return sum(self.kv_bytes_per_layer(kind), Fraction(0))

    def kv_bytes(self, kind: KVCacheKind, tokens: int) -> Fraction:
        """Bytes of all caches of one sequence of `tokens`, what is kept of its first tokens included.

        Every token counts, under a local window too: a window limits what queries see, not what caches keep.
        """
        return tokens * self.kv_bytes_per_token(kind) + self.first_bytes(kind, tokens)

    def first_bytes(self, kind: KVCacheKind, tokens: int | None = None) -> int:
        """Constant bytes of a sequence besides those of every token: first tokens at full precision, memory slots.

        They have the cache's own type, bfloat16 with a quantised one. `tokens` is the sequence's length.
        """
        size = EXACT_BYTES.get(kind, EXACT_BYTES[KVCacheKind.BF16])
        return self.state_bytes + sum(
            min(n, n if tokens is None else tokens) * sum(heads * width for _, heads, width in streams) * size
            for n, streams in self.kv_first
        )

    def with_split_keys(self) -> Cost:
        """Return the same where that kernel runs: in 16 bits, on a device that has it."""
        return replace(
            self,
            activation_elements=self.activation_elements - self.spared_elements,
            spared_elements=0,
            children=tuple(child.with_split_keys() for child in self.children),
        )

    def flops_per_token(self, context: int) -> float:
        """FLOPs per token of one forward over a sequence of `context` tokens, as the layers compute it.

        The sum of 2 * matmul_params_used and, per attention, of 2 * mean_keys * forward_width and of
        2 * forward_weights / context. A sequence of one token takes `width`, like a decode step.

        Convention: a multiplication and its addition are two FLOPs, and only matrix products count. Scores and values
        count the pairs that a query sees: causal, within its window, the null key included. Pairs that a mask hides do
        not count, although unfused backends compute them, nor do zeros that make values as wide as keys. Norms,
        activations, biases and softmax are left out: linear in the width, below one per cent of the matrix work.
        """
        if context == 1:
            return self.decode_flops_per_token(1)
        once = sum((Fraction(2 * work.forward_weights, context) for work in self.attention), Fraction(0))
        return self._flops(context, lambda work: work.forward_width or work.width, once)

    def decode_flops_per_token(self, context: int) -> float:
        """FLOPs per token of decoding a sequence one token at a time: as `flops_per_token`, with `width`."""
        return self._flops(context, lambda work: work.width, Fraction(0))

    def _flops(self, context: int, width: Callable[[AttentionWork], int], once: Fraction) -> float:
        attention = sum((2 * work.mean_keys(context) * width(work) for work in self.attention), once)
        attention += sum((work.first_flops(context) for work in self.attention), Fraction(0))
        return float(2 * self.matmul_params_used + attention)

    def leaves(self) -> Iterator[tuple[Cost, int, int]]:
        """Yield every layer, how often it runs per forward pass, and how many copies of its weights exist."""
        if not self.children:
            yield self, 1, 1
        for child in self.children:
            for leaf, runs, copies in child.leaves():
                yield leaf, runs * self.repeat, copies if self.shared else copies * self.repeat


def layer_cost(
    label: str,
    type: str,
    width_in: Width,
    width_out: Width,
    shapes: dict[str, tuple[int, ...]],
    saved: int | None,
    attention: AttentionWork | None = None,
    streams: Streams = (),
    copied: Collection[str] = (),
    spared: int = 0,
) -> Cost:
    """Return the cost of a leaf layer.

    Parameters of two or more dimensions multiply activations, and `copied` names those that surgery copies. `saved`
    counts the elements per token that backward needs, None if unknown, and `spared` those that split keys save."""
    return Cost(
        label=label,
        type=type,
        width_in=width_in,
        width_out=width_out,
        params=sum(math.prod(shape) for shape in shapes.values()),
        matmul_params_used=sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1),
        attention=() if attention is None else (attention,),
        kv=() if attention is None and not streams else (streams,),
        activation_elements=saved or 0,
        spared_elements=spared,
        copied_params=sum(math.prod(shape) for name, shape in shapes.items() if name in copied),
        unknown=frozenset({("activations", type)} if saved is None else ()),
    )


def container_cost(
    type: str,
    width_in: Width,
    width_out: Width,
    children: tuple[Cost, ...],
    repeat: int = 1,
    shared: bool = False,
    label: str = "",
) -> Cost:
    """Return the cost of a node that runs its children `repeat` times, with the same weights if `shared`.

    Raises:
        TooManyRuns: the node runs more than `MOST_RUNS` layers.
    """
    runs = sum(child.runs for child in children) * repeat
    if runs > MOST_RUNS:
        raise TooManyRuns(f"runs at most {MOST_RUNS:,} layers in a forward", f"{runs:,}", "repeat fewer")
    return Cost(
        label=label,
        type=type,
        width_in=width_in,
        width_out=width_out,
        params=sum(child.params for child in children) * (1 if shared else repeat),
        matmul_params_used=sum(child.matmul_params_used for child in children) * repeat,
        attention=tuple(work for child in children for work in child.attention) * repeat,
        kv=tuple(streams for child in children for streams in child.kv) * repeat,
        kv_first=tuple(first for child in children for first in child.kv_first) * repeat,
        state_bytes=sum(child.state_bytes for child in children) * repeat,
        activation_elements=sum(child.activation_elements for child in children) * repeat,
        spared_elements=sum(child.spared_elements for child in children) * repeat,
        children=children,
        repeat=repeat,
        shared=shared,
        runs=runs,
        unknown=frozenset(item for child in children for item in child.unknown),
    )


def expect_width(width: Width, expected: int, field: str) -> None:
    """Raise a WidthError unless `width` is one stream of `expected` features, the value of key `field`."""
    if width.stack is not None:
        raise WidthError(
            f"expects width {expected}",
            width.label,
            "put a LinearLayer with reduce: mean, sum or concat between them",
        )
    if width.d_model != expected:
        raise WidthError(f"expects width {expected}", width.label, f"set {field}: {width.d_model}")
