"""Calls of every kernel's launcher as models make them, on a GPU in bfloat16 above all: of each kernel the ways in which
it is compiled, at widths of models. What is in the tensors counts for nothing, and memory of most is never touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.examples import is_thorough
from tests.ops.decoding_cases import BLOCKS, decoding
from tests.ops.launcher_case import BF16, F16, F32, Case, one
from tests.ops.storing_cases import appended, stored_tokens


def norms() -> Iterator[Case]:
    forward, backward = ("_forward_kernel",), ("_backward_kernel", "_sum_kernel")
    for name, x, w in (("bf16", BF16, BF16), ("bf16 by fp32", BF16, F32), ("fp32", F32, F32)):
        rows, weight, rstd = one(64, 2048, dtype=x), one(2048, dtype=w), one(64, dtype=F32)
        yield Case("rms_norm", name, forward, lambda a=(rows, weight, 1e-5): a)
        yield Case("layer_norm", name, forward, lambda a=(rows, weight, weight, 1e-5): a)
        yield Case("rms_norm_backward", name, backward, lambda a=(rows, None, rows, rstd, weight): a)
        grads = (rows, None, rows, rstd, rstd, weight, weight)
        yield Case("layer_norm_backward", name, backward, lambda a=grads: a)
    rows, weight, rstd = one(64, 1000), one(1000), one(64, dtype=F32)
    yield Case("rms_norm", "no weight", forward, lambda: (rows, None, 1e-5))
    yield Case("layer_norm", "no bias", forward, lambda: (rows, weight, None, 1e-5))
    yield Case("layer_norm", "neither", forward, lambda: (one(2, 65536), None, None, 1e-5))
    yield Case("add_rms_norm", "bf16", forward, lambda: (rows, rows, weight, 1e-5))
    yield Case("add_layer_norm", "bf16", forward, lambda: (rows, rows, weight, weight, 1e-5))
    yield Case("rms_norm_backward", "sum, no weight", backward[:1], lambda: (rows, rows, rows, rstd, None))
    added = (rows, rows, rows, rstd, rstd, weight, None)
    yield Case("layer_norm_backward", "sum, no bias", backward, lambda: added)
    wide, held = one(64, 16384), one(16384)
    yield Case("layer_norm_backward", "wide", backward, lambda: (wide, None, wide, rstd, rstd, held, held))


def norms_with_activations() -> Iterator[Case]:
    forward, backward = ("_forward_kernel",), ("_backward_kernel", "_sum_kernel")
    for name, dtype, width, vectors, p, seed, activation in (
        ("gelu", BF16, 2048, BF16, 0.1, 2**40 + 1, "gelu"),
        ("gelu fp16", F16, 2048, F16, 0.1, 7, "gelu"),
        ("silu fp32", F32, 1000, F32, 0.1, 7, "silu"),
        ("relu by fp32", BF16, 2048, F32, 0.0, 7, "relu"),
        ("no weight", BF16, 1000, None, 0.1, 7, "gelu"),
    ):
        x, mean = one(64, width, dtype=dtype), one(64, dtype=F32)
        vector = None if vectors is None else one(width, dtype=vectors)
        rest = (vector, vector, 1e-5, p, seed, activation)
        yield Case("norm_dropout_activation", name, forward, lambda a=(x, *rest): a)
        grads = (x, x, mean, mean, vector, vector, p, seed, activation)
        kernels = backward[: 1 if vector is None else 2]
        yield Case("norm_dropout_activation_backward", name, kernels, lambda a=grads: a)


def elementwise() -> Iterator[Case]:
    forward, backward = ("_forward_kernel",), ("_backward_kernel",)
    for name, dtype in (("bf16", BF16), ("fp32", F32)):
        x, packed = one(64, 5632, dtype=dtype), one(64, 2 * 5632, dtype=dtype)
        yield Case("swiglu", name, forward, lambda x=x: (x, x))
        yield Case("swiglu_backward", name, backward, lambda x=x: (x, x, x))
        yield Case("swiglu_packed", name, forward, lambda packed=packed: (packed,))
        yield Case("swiglu_packed_backward", name, backward, lambda x=x, packed=packed: (x, packed))
        yield Case("scale_", name, ("_kernel",), lambda x=x: (x, one(1, dtype=F32)))
    for name, dtype, classes, writes in (
        ("bf16", BF16, 128256, True),
        ("fp16, loss only", F16, 50257, False),
        ("fp32, few classes", F32, 1000, True),
    ):
        rows = (one(4, classes, dtype=dtype), one(4, dtype=torch.int64), one(4, dtype=F32))
        rest = (-100, 0.5, 1e-4, writes)
        yield Case("cross_entropy_rows", name, ("cross_entropy_rows_kernel",), lambda a=(*rows, *rest): a)
    for name, dtype, classes, temperature, weight, writes in (
        ("bf16", BF16, 49152, 1.0, 1.0, True),
        ("bf16 with cross-entropy", BF16, 128256, 2.0, 0.7, True),
        ("fp32, losses only", F32, 1000, 1.0, 0.5, False),
    ):
        logits = one(4, classes, dtype=dtype)
        rows = (logits, logits, one(4, dtype=torch.int64), one(4, dtype=F32), one(4, dtype=F32))
        rest = (-100, temperature, weight, writes)
        yield Case("distillation_rows", name, ("distillation_rows_kernel",), lambda a=(*rows, *rest): a)
    parts = ("_parts_kernel", "_join_kernel")
    for name, dtype, width in (("bf16", BF16, 128256), ("fp32", F32, 50257), ("widest", BF16, 2**21)):
        logits = one(2, width, dtype=dtype)
        yield Case("argmax_logprob", name, parts, lambda logits=logits: (logits,))
        if name == "bf16":
            wide = one(2, dtype=torch.float64), one(2, dtype=torch.float64)
            yield Case("sample", name, parts, lambda logits=logits, wide=wide: (logits, *wide))
    for rows in (1, 32):
        angles = one(rows, 1, dtype=torch.int32), one(16, 1, 128)
        yield Case("rope_cos_sin", f"{rows} rows", ("_angles_kernel",), lambda a=angles: a)
        kept = one(rows, 128, dtype=torch.int64), one(rows, 128), one(rows, dtype=torch.int64)
        call = (one(rows, dtype=torch.int64), one(rows), one(dtype=torch.int64), *kept)
        yield Case("store_sample", f"{rows} rows", ("_keep_kernel",), lambda a=call: a)
    for width, extra in ((1, True), (8, True), (4, False)):
        texts = one(2, 4104, dtype=torch.int64), one(2, dtype=torch.int32), one(2, 9, dtype=torch.int64)
        call = (*texts, one(2, width, dtype=torch.int64), one(2, dtype=torch.bool), 7, 4, extra)
        yield Case("prompt_lookup_step", f"{width} tokens", ("_round_kernel",), lambda a=call: a)


def rotations() -> Iterator[Case]:
    for name, dtype, tables, inverse, batches in (
        ("bf16", BF16, BF16, False, 1),
        ("bf16 by fp32, inverse", BF16, F32, True, 2),
        ("fp32", F32, F32, False, 1),
    ):
        heads_first, tokens_first = (
            one(2, 8, 48, 64, dtype=dtype),
            one(2, 48, 8, 64, dtype=dtype).transpose(1, 2),
        )
        table = one(*((2,) if batches > 1 else ()), 1, 48, 32, dtype=tables)
        for order, x in (("heads first", heads_first), ("tokens first", tokens_first)):
            call = (x, table, table, 1.0, inverse, dtype)
            yield Case("rope", f"{name}, {order}", ("_kernel",), lambda a=call: a)
        joined = one(2, 48, (8 + 2 * 2) * 64, dtype=dtype)
        yield Case("rope_qkv", name, ("_kernel",), lambda a=(joined, table, table, 8, 2, 0.125): a)
        q, k = tokens_first, one(2, 48, 2, 64, dtype=dtype).transpose(1, 2)
        call = (q, k, k, table, table, 8, 2, 0.125)
        yield Case("rope_qkv_backward", name, ("_kernel",), lambda a=call: a)


def latent() -> Iterator[Case]:
    for name, dtype, width, geo, map_dtype, per_row in (
        ("bf16", BF16, 64, 64, BF16, False),
        ("bf16 by fp32, tables of rows", BF16, 64, 256, F32, True),
        ("fp16, widest", F16, 128, 256, F16, False),
        ("bf16, odd widths", BF16, 24, 80, BF16, False),
    ):
        q, geo_map = one(2, 128, 4, width, dtype=dtype), one(4, width, geo, dtype=map_dtype)
        table = one(*((2, 1) if per_row else (1,)), 128, geo // 2, dtype=F32)
        rest = (q, geo_map, table, table, 0.125)
        yield Case("latent_queries", name, ("_forward_kernel",), lambda a=rest: a)
        # Attention gives the gradient in the order of heads or of tokens.
        grad = one(2, 4, 128, width + geo, dtype=dtype).transpose(1, 2)
        yield Case("latent_queries_backward", name, ("_backward_kernel",), lambda a=(grad, *rest): a)
    for name, dtype, n, width in (
        ("bf16", BF16, 4, 64),
        ("fp16, widest", F16, 16, 128),
        ("bf16, odd widths", BF16, 3, 24),
    ):
        q = one(2, 128, 4, 2 * width, dtype=dtype).transpose(1, 2)[..., :width]
        k, table = one(2, 2, n, width, dtype=dtype), one(1, 128, width // 2, dtype=F32)
        rest = (q, k, k, one(2, width, dtype=F32), table, table)
        yield Case("first_tokens", name, ("_forward_kernel",), lambda a=rest: a)
        grads = one(2, 4, 128, width, dtype=dtype), one(2, 4, 128, 1, dtype=F32)
        call = (*grads, *rest, one(2, 4, 128, 1, dtype=F32))
        yield Case("first_tokens_backward", name, ("_backward_kernel",), lambda a=call: a)
    for name, dtype, batch, n_tokens, width, rank, geo in (
        ("bf16", BF16, 32, 1, 64, 128, 64),
        ("bf16, one row", BF16, 1, 1, 64, 128, 256),
        ("fp16, widest", F16, 130, 1, 128, 512, 64),
        ("fp32, widest", F32, 130, 1, 128, 512, 64),
        ("bf16, odd widths", BF16, 3, 7, 24, 130, 80),
    ):
        q, table = one(batch, n_tokens, 4, width, dtype=dtype), one(1, n_tokens, geo // 2, dtype=F32)
        maps = one(4, width, rank, dtype=dtype), one(4, width, geo, dtype=dtype)
        call = (q, *maps, table, table, 0.125)
        if dtype != F32:  # whose queries plain PyTorch makes
            yield Case("absorbed_queries", name, ("_queries_kernel",), lambda a=call: a)
            together = one(batch, n_tokens, 1, rank + geo, dtype=dtype).transpose(1, 2)
            added = together.split((rank, geo), dim=-1)
            lengths = one(batch, dtype=torch.int32)
            for into in ([rank + geo], [rank, geo]):
                buffers = [one(batch, 1, 512, d, dtype=dtype) for d in into]
                step = (*call, *added, buffers, lengths)
                where = f"{name}, {len(into)} buffers"
                yield Case("absorbed_step", where, ("_step_kernel",), lambda a=step: a)
        values = one(batch, n_tokens, 4, rank, dtype=dtype), one(4, rank, width, dtype=dtype)
        yield Case("per_head_linear", name, ("_values_kernel",), lambda a=values: a)


def attention() -> Iterator[Case]:
    for name, dtype, (heads, sem, geo, value), kv_heads, tokens in (
        ("bf16, expanded", BF16, (32, 64, 256, 64), (32, 1, 32), (2048, 2048)),
        ("bf16, expanded behind a prompt", BF16, (32, 64, 256, 64), (32, 1, 32), (100, 3001)),
        ("bf16, absorbed", BF16, (32, 128, 256, 128), (1, 1, 1), (128, 3000)),
        ("fp16, absorbed", F16, (32, 128, 256, 128), (1, 1, 1), (2048, 2048)),
        ("bf16, narrow", BF16, (4, 32, 128, 16), (2, 4, 1), (70, 133)),
        ("bf16, llama32_dba_384b", BF16, (4, 64, 64, 64), (4, 1, 4), (200, 700)),
        # The absorbed form has both dtypes, and compiling this takes twelve seconds.
        *([("fp16, expanded", F16, (32, 64, 256, 64), (32, 1, 32), (2048, 2048))] if is_thorough else []),
    ):
        n_queries, n_keys = tokens
        widths = (sem, geo, value)
        q = one(1, n_queries, heads, sem + geo, dtype=dtype)
        streams = [one(1, n_keys, k, d, dtype=dtype) for k, d in zip(kv_heads, widths, strict=True)]
        if kv_heads == (1, 1, 1):  # of a cache, side by side
            joined = one(1, 1, n_keys + 7, sem + geo, dtype=dtype)[:, :, :n_keys].transpose(1, 2)
            c, k_geo = joined.split((sem, geo), dim=-1)
            streams = [c, k_geo, c]
        firsts = [None] if n_queries < n_keys else [None, one(1, n_queries, dtype=torch.int64)]
        for first in firsts:
            where = name if first is None else f"{name}, documents"
            call = (q, *streams, first)
            yield Case("decoupled_attention", where, ("_forward_kernel",), lambda a=call: a)
            out, lse = one(1, n_queries, heads, value, dtype=dtype), one(1, heads, n_queries, dtype=F32)
            back = (one(1, heads, n_queries, value, dtype=dtype).transpose(1, 2), *call, out, lse)
            kernels = ("_dots_kernel", "_keys_kernel", "_queries_kernel")
            yield Case("decoupled_attention_backward", where, kernels, lambda a=back: a)


def blocks() -> Iterator[Case]:
    for kind, (elements, code_width, codes, scales) in BLOCKS.items():
        for name, dtype in (("bf16", BF16), ("fp32", F32)):
            yield Case(
                "quantize",
                f"{kind} {name}",
                ("_quantize",),
                lambda k=kind, d=dtype: (one(64, 2048, dtype=d), k),
            )
            n_blocks = 2048 // elements
            held = (one(2, n_blocks, 48, code_width, dtype=codes), one(2, n_blocks, 48, dtype=scales))
            # A cache's, which lie by blocks first.
            call = (*(x.transpose(1, 2) for x in held), kind, 2048, dtype)
            yield Case("dequantize", f"{kind} {name}", ("_dequantize",), lambda a=call: a)


def optimisers() -> Iterator[Case]:
    def adamw(
        p: torch.dtype,
        moment: torch.dtype,
        g: torch.dtype,
        w: torch.dtype | None,
        on: bool,
        seed: bool,
        size: int,
        in_moments: bool = False,
    ) -> tuple[Any, ...]:
        tensors = [[one(size, dtype=dtype)] for dtype in (p, moment, moment)]
        given = [one(1, dtype=F32) if on else None for _ in range(4)]
        return (
            *(*tensors, [one(1, dtype=F32)], [one(size, dtype=g)], [] if w is None else [one(size, dtype=w)]),
            *(1e-3, 0.9, 0.95, 1e-8, 0.1, False, *given, one(1, dtype=torch.int64) if seed else None, 0),
            in_moments,
        )

    kernels = ("_adamw_count", "_adamw_step")
    for name, call in (
        ("fp32", (F32, F32, F32, None, False, False, 5000)),
        ("masters", (F32, F32, BF16, BF16, True, False, 5000)),
        ("masters, fp16", (F32, F32, F16, F16, True, False, 5000)),
        ("bf16 moments", (F32, BF16, BF16, BF16, False, False, 5000)),
        ("at random", (BF16, BF16, BF16, None, True, True, 5000)),
        ("at random, fp32 moments", (BF16, F32, BF16, None, False, True, 5000)),
        ("masters in the moments", (BF16, F32, BF16, None, True, False, 5000, True)),
    ):
        yield Case("adamw_step", name, kernels, lambda a=call: adamw(*a))
    yield Case("adamw_step", "empty", kernels[:1], lambda: adamw(F32, F32, F32, None, False, False, 0))
    for name, (p, m, g) in {"fp32": (F32, F32, F32), "bf16": (BF16, F32, BF16)}.items():
        call = [[one(5000, dtype=dtype)] for dtype in (p, m, g)]
        yield Case("lion_step", name, ("_kernel",), lambda a=call: (*a, 1e-3, 0.9, 0.99, 0.1))
        askew = [[one(5001, dtype=dtype)[1:]] for dtype in (p, m, g)]
        yield Case("lion_step", f"{name}, askew", ("_kernel",), lambda a=askew: (*a, 1e-3, 0.9, 0.99, 0.1))
    norm = ("_list_norms_chunks", "_list_norms_sum")
    yield Case("foreach_norm", "bf16 and fp32", norm * 2, lambda: ([one(70000), one(70000, dtype=F32)],))
    yield Case("foreach_norm", "fp16, askew", norm, lambda: ([one(70001, dtype=F16)[1:]],))
    for name, start in (("aligned", 0), ("askew", 1)):
        lists = [[one(5001, dtype=dtype)[start:]] for dtype in (F32, BF16)]
        yield Case("stochastic_round", name, ("_kernel",), lambda a=lists: (*a, one(1, dtype=torch.int64), 0))


def float8() -> Iterator[Case]:
    kernels = ("_find_kernel", "_cast_kernel")
    for recipe, per_tensor in (("tensor", True), ("rows", False)):
        for name, dtype, m, n, e5m2 in (
            ("bf16", BF16, 256, 512, False),
            ("bf16 to e5m2", BF16, 256, 512, True),
            ("fp32, uneven", F32, 100, 200, False),
        ):
            if e5m2 and not per_tensor:  # casts to it are those of one scale
                continue
            x, packed = one(m, n, dtype=dtype), one(m, 2 * n, dtype=dtype)
            yield Case("float8_cast", f"{recipe}, {name}", kernels, lambda a=(x, per_tensor, e5m2): a)
            # A product's result: of one scale what undoes it is in it already.
            scales = (
                (one(1, dtype=F32), one(1, dtype=F32)) if per_tensor else (one(m, 1, dtype=F32), one(n, 1, dtype=F32))
            )
            call = (x, *scales, packed, per_tensor, e5m2)
            yield Case("float8_swiglu_backward", f"{recipe}, {name}", kernels, lambda a=call: a)
            if not e5m2:
                yield Case("float8_swiglu", f"{recipe}, {name}", kernels, lambda a=(packed, per_tensor): a)


def row_products() -> Iterator[Case]:
    kinds = (
        ("plain", BF16, 1, 2048, 3072, False, False, None, False),
        ("head", BF16, 1, 2048, 128256, False, False, BF16, False),
        ("norm, bias", BF16, 1, 2048, 2048, True, False, BF16, False),
        ("gated", BF16, 1, 2048, 16384, False, False, BF16, True),
        ("residual", BF16, 1, 8192, 2048, False, True, None, False),
        ("gated, rows, all of it", BF16, 4, 2048, 16384, True, True, F32, True),
        ("most rows, uneven", BF16, 8, 1000, 300, True, True, F32, False),
        ("fp16, widest", F16, 2, 16384, 4096, False, False, None, False),
        ("fp32", F32, 1, 2048, 2048, False, True, F32, False),
        ("rows, residual", BF16, 8, 8192, 2048, False, True, None, False),
        ("sixteen rows, norm", BF16, 16, 2048, 3072, False, False, BF16, False),
        ("many rows, gated", BF16, 32, 2048, 16384, False, False, BF16, True),
        ("most rows, residual", BF16, 64, 8192, 2048, False, True, None, False),
        ("most rows, head", F16, 64, 2048, 128256, False, False, None, False),
    )
    coded = [(f"codes: {name}", *given) for name, *given in kinds]
    for name, dtype, rows, width, n_out, bias, residual, norm, gated in (*kinds, *coded):
        codes = name.startswith("codes")
        out = n_out // 2 if gated else n_out
        call = (
            *(one(rows, width, dtype=dtype), one(n_out, width, dtype=torch.int8 if codes else dtype)),
            one(n_out, dtype=F32) if codes else None,
            one(n_out, dtype=dtype) if bias else None,
            one(rows, out, dtype=dtype) if residual else None,
            *(None if norm is None else one(width, dtype=norm), 1e-5 if norm is not None else None, gated),
        )
        kernels = ("_tiles_kernel",) if rows > 1 and dtype != F32 else ("_kernel",)
        kernels = ("_forward_kernel", *kernels) if kernels == ("_tiles_kernel",) and norm is not None else kernels
        yield Case("small_batch_linear", name, kernels, lambda a=call: a)
    call = (one(1, 2048), one(4096, 2048), None, None, None, None, 1e-5, False)
    yield Case("small_batch_linear", "norm without weight", ("_kernel",), lambda: call)
    for name, dtype, rows, group, norm in (
        ("words", BF16, 1, 128, BF16),
        ("words: rows", BF16, 8, 128, F32),
        ("words: many rows", BF16, 64, 128, None),
        ("words: fp16 rows", F16, 17, 128, F16),
        ("words: rows of small groups", BF16, 3, 64, BF16),
        ("words: fp32", F32, 1, 128, F32),
        ("words: small groups", F16, 1, 32, None),
    ):
        n_groups, gated = 2048 // group - 1, norm is not None
        width = n_groups * group
        given = (
            *(one(rows, width, dtype=dtype), one(512, width // 4, dtype=torch.int16)),
            *(one(512, n_groups, 2), one(512, dtype=dtype), one(rows, 256 if gated else 512, dtype=dtype)),
            *(None if norm is None else one(width, dtype=norm), None if norm is None else 1e-5, gated),
        )
        before = ("_forward_kernel",) if rows > 1 and norm is not None else ()
        kernel = "_tiles_kernel" if rows > 1 and group == 128 else "_words_kernel"
        yield Case("small_batch_linear", name, (*before, kernel), lambda a=given: a)


def weights_of_words() -> Iterator[Case]:
    for name, dtype, group in (("bf16", BF16, 128), ("fp16, small groups", F16, 32), ("fp32", F32, 64)):
        call = (one(300, 6 * group // 4, dtype=torch.int16), one(300, 6, 2), dtype)
        yield Case("dequantize_int4", name, ("_numbers_kernel",), lambda a=call: a)


FAMILIES = (
    *(norms, norms_with_activations, elementwise, rotations, latent, attention, blocks, optimisers, float8),
    *(row_products, weights_of_words, appended, stored_tokens, decoding),
)
CASES = [case for family in FAMILIES for case in family()]
