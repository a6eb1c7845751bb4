"""Attention by sequences of packed rows equals the mask, whatever form of varlen_attn torch has."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from model_specs import VOCAB, attention, block, spec
from test_properties import lively
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.config.kvcache import KVCacheKind
from caramba.config.layer import AttentionLayerConfig
from caramba.errors import ConfigError, KernelUnavailable
from caramba.layer import AttentionLayer, Documents, StoredDocuments, attention_backends
from caramba.layer.score import (
    VarlenKernel,
    check_kernel,
    find_kernel,
    fixed_documents,
    has_aligned_rows,
    measure_error,
    varlen_attention,
)
from caramba.lower.document_separation import documents_path
from caramba.runtime import AttentionChoice

CPU = torch.device("cpu")
IDS = torch.tensor([[0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, -1], [7] * 12, [3, 3, 4, 4, 3, 3, 5, 6, 7, 8, 8, 8]])


def by_sequence(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, left: int, right: int
) -> Tensor:
    """softmax(scale q k^T) v of every sequence of [N, H, D], one at a time; windows as flash attention counts them."""
    assert starts.dtype == torch.int32
    assert query.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    places = starts.tolist()
    outputs = []
    for begin, end in pairwise(places):
        if begin == end:
            continue
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        groups = len(q) // len(k)
        ahead = torch.arange(end - begin) - torch.arange(end - begin)[:, None]
        hidden = (ahead > right if right >= 0 else ahead > end) | (-ahead > left if left >= 0 else ahead > end)
        scores = scale * q @ k.repeat_interleave(groups, 0).mT
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 0))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def newer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert scale is not None
    return by_sequence(query, key, value, cu_seq_q, scale, *window_size)


def older(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> Tensor:
    if query.shape[1] != key.shape[1]:
        raise ValueError("heads")
    return by_sequence(query, key, value, cu_seq_q, query.shape[-1] ** -0.5, -1, 0 if is_causal else -1)


def on_cpu(call: Any) -> VarlenKernel:
    return VarlenKernel.of(call, device="cpu", dtypes=(torch.float64,))


class Calls(TorchDispatchMode):
    """Counts the operators whose name has a word in it."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.count = word, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.word in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", [newer, older])
def test_models_give_the_same_numbers_and_gradients(call: Any) -> None:
    kernel = on_cpu(call)
    assert measure_error(kernel, CPU) < 1e-12
    layers = [attention("gqa_scaled"), block("decoupled_gate"), attention("window"), attention("latent")]
    model = lively(spec(*layers, max_positions=12)).double()
    tokens = torch.randint(VOCAB, IDS.shape, generator=torch.Generator().manual_seed(1))

    def run() -> tuple[Tensor, ...]:
        out = model(tokens, documents=IDS)
        return out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))

    expected = run()
    calls: list[int] = []
    counted = VarlenKernel(
        lambda *args, **words: calls.append(1) or call(*args, **words), kernel.takes, "cpu", kernel.dtypes
    )
    with varlen_attention(counted):
        found = run()
    assert len(calls) == (4 if call is newer else 3)  # without windows the mask serves that layer
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_parts_of_a_wider_product_are_copied_where_no_load_of_16_bytes_may_begin() -> None:
    given: list[Tensor] = []
    kernel = VarlenKernel(
        lambda *args, **words: given.extend(args[:3]) or newer(*args, **words),
        on_cpu(newer).takes,
        "cpu",
        (torch.float64,),
    )
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    for before, is_taken in ((8, True), (4, False), (6, False)):
        product = torch.randn(1, 5, before + 3 * 8, dtype=torch.float64)
        q, k, v = (part[:, None] for part in product[..., before:].split(8, dim=-1))
        given.clear()
        found = kernel.attend(q, k, v, starts)
        alone = kernel.attend(q.contiguous(), k.contiguous(), v.contiguous(), starts)
        torch.testing.assert_close(found, alone)
        for mine, theirs in zip(given[:3], (q, k, v), strict=True):
            assert (mine.data_ptr() == theirs.data_ptr()) is is_taken
            assert not any(place % 8 for place in (mine.storage_offset(), mine.stride(0)))
    compiled = torch.compile(has_aligned_rows, fullgraph=True, backend="eager")
    assert (has_aligned_rows(torch.zeros(5, 8), 8), compiled(torch.zeros(5, 8), 8)) == (True, False)


def test_sequences_begin_where_documents_do() -> None:
    assert Documents.of(IDS).starts is None
    with varlen_attention(on_cpu(newer)):
        starts = Documents.of(IDS).starts
    assert starts is not None
    assert starts.tolist() == [0, 1, 5, 11, 12, 24, 26, 28, 30, 31, 32, 33, 36]
    assert starts.dtype == torch.int32


@pytest.mark.parametrize("kernel", [None, on_cpu(newer)])
def test_packed_prompts_fill_the_rows_of_a_context(kernel: VarlenKernel | None) -> None:
    layers = [attention("gqa_scaled"), block("decoupled_gate"), attention("window"), attention("latent")]
    layers.append(attention("latent_gate"))  # absorbed, where the other latent expands its keys
    model = lively(spec(*layers, max_positions=12)).double()
    tokens = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    # The third has no tokens; what is behind the fourth's is beyond a row of 5, and goes to its last place.
    starts, rows = torch.tensor([0, 3, 4, 4, 12]), torch.tensor([2, 0, 3, 1])
    ctx = model.new_context(4, 5, KVCacheKind.FP32, static=True)
    ctx.clear()
    with torch.no_grad(), fixed_documents(kernel):
        prompts = StoredDocuments.packed(starts, rows, 12, 5, ctx.caches)
        with Calls("caramba.store_tokens") as stores, Calls("index_copy") as copies:
            hidden = model.hidden(tokens[None], prompts)
        assert (stores.count, copies.count) == (len(ctx.caches), 0)
        assert next(prompts.caches, None) is None
        for row, begin, end in ((2, 0, 3), (0, 3, 4), (1, 4, 8)):
            alone = model.new_context(1, 5, KVCacheKind.FP32, static=True)
            # A cache of float32 rounds what is attended to.
            torch.testing.assert_close(
                hidden[:, begin:end], model.hidden(tokens[None, begin:end], alone), rtol=1e-6, atol=1e-7
            )
            for cache, own in zip(ctx.caches, alone.caches, strict=True):
                for into, wanted in zip(cache.allocations, own.allocations, strict=True):
                    n_tokens = end - begin
                    torch.testing.assert_close(into[row, :, :n_tokens], wanted[0, :, :n_tokens])
        assert not any(memory[3].any() for cache in ctx.caches for memory in cache.allocations)
        with pytest.raises(ConfigError, match="an attention application has no cache"):
            model.hidden(tokens[None], prompts)


@pytest.mark.parametrize("name", ["standard", "decoupled", "latent"])
def test_what_packed_prompts_attend_to_is_what_their_cache_holds(name: str) -> None:
    model = lively(spec(attention(name), max_positions=12))
    ctx = model.new_context(3, 5, KVCacheKind.BF16, static=True)
    (cache,) = ctx.caches
    starts, rows = torch.tensor([0, 3, 7]), torch.tensor([2, 1])
    prompts = StoredDocuments.packed(starts, rows, 7, 5, ctx.caches)
    streams = {stream: torch.randn(1, heads, 7, width) for stream, heads, width in cache.streams}
    kept = prompts.kept(streams)
    assert list(kept) == [stream for stream, _, _ in cache.streams]
    held = torch.cat(cache.allocations, dim=-1)
    for row, begin, end in ((2, 0, 3), (1, 3, 7)):
        mine = torch.cat([x[0, :, begin:end] for x in kept.values()], dim=-1)
        assert mine.dtype == torch.bfloat16
        assert torch.equal(held[row, :, : end - begin], mine)
        wanted = torch.cat([x[0, :, begin:end] for x in streams.values()], dim=-1)
        torch.testing.assert_close(mine.float(), wanted, rtol=2**-8, atol=0)


def test_what_needs_a_mask_keeps_it_and_says_so() -> None:
    def refuses(*args: Any, **words: Any) -> Tensor:
        raise AssertionError

    kernel = VarlenKernel(refuses, on_cpu(newer).takes, "cpu", (torch.float64,))
    narrow = AttentionLayerConfig(d_model=16, n_heads=2)
    for words in ({"null_attn": True}, {"dropout": 0.5}):
        layer = AttentionLayer(narrow.model_copy(update=words)).double()
        with varlen_attention(kernel):
            assert layer(torch.randn(3, 12, 16).double(), Documents.of(IDS)).isfinite().all()
    with varlen_attention(kernel), pytest.raises(AssertionError):
        AttentionLayer(narrow).double()(torch.randn(3, 12, 16).double(), Documents.of(IDS))
    layer = AttentionLayer(narrow)
    with varlen_attention(kernel):  # of another dtype
        layer(torch.randn(3, 12, 16), Documents.of(IDS))


def test_the_path_is_decided_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = AttentionChoice(None, False, "measured")
    plain = AttentionLayerConfig(d_model=16, n_heads=2)
    null = plain.model_copy(update={"null_attn": True, "dropout": 0.1})
    assert documents_path(CPU, torch.bfloat16, [plain], choice) == (
        "mask",
        "variable-length attention is for CUDA, not for cpu",
    )
    monkeypatch.setattr("caramba.lower.document_separation.find_kernel", lambda device: VarlenKernel.of(newer))
    assert documents_path(CPU, torch.bfloat16, [plain], choice)[0] == "varlen"
    assert documents_path(CPU, torch.bfloat16, [plain, null], choice) == (
        "varlen, mask",
        "1 of 2 attention layers need the mask: null_attn, dropout 0.1",
    )
    assert documents_path(CPU, torch.bfloat16, [null], choice)[0] == "mask"
    assert "16 bits, not float32" in documents_path(CPU, torch.float32, [plain], choice)[1]
    assert "compile_model" in documents_path(CPU, torch.bfloat16, [plain], choice, is_compiled=True)[1]
    slow = AttentionChoice(None, False, "measured", uses_varlen=False)
    assert documents_path(CPU, torch.bfloat16, [plain], slow) == ("mask", "varlen_attn is slower: measured")


def test_a_function_is_taken_only_if_it_gives_the_numbers_of_the_mask() -> None:
    serves: dict[str, Any] = {"dtypes": (torch.float64,)}

    def rows_only(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        return older(query, key, value, cu_seq_q[[0, -1]], cu_seq_k, max_q, max_k, is_causal)

    def fails(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        raise RuntimeError("no kernel image\nmore")

    def reads_groups(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool = False,
    ) -> Tensor:
        return by_sequence(query, key, value, cu_seq_q, query.shape[-1] ** -0.5, -1, 0 if is_causal else -1)

    for call, is_grouped in ((newer, True), (older, False), (reads_groups, True)):
        kernel = check_kernel(call, CPU, **serves)
        assert isinstance(kernel, VarlenKernel)
        assert kernel.is_grouped == is_grouped, "keys and values are repeated where they have to be"
    assert "differs from the mask by" in str(check_kernel(rows_only, CPU, **serves))
    assert check_kernel(fails, CPU, **serves) == "varlen_attn does not run: RuntimeError: no kernel image"
    assert "expected (query, key" in str(check_kernel(lambda q: q, CPU, **serves))


def test_signatures_that_are_not_known_are_refused() -> None:
    with pytest.raises(KernelUnavailable, match=r"takes \(q, k\), expected \(query, key"):
        VarlenKernel.of(lambda q, k: q)

    def no_causality(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any
    ) -> None: ...

    with pytest.raises(KernelUnavailable, match="neither window_size nor is_causal"):
        VarlenKernel.of(no_causality)
    from torch.nn.attention.varlen import varlen_attn

    assert {"scale", "window_size"} <= VarlenKernel.of(varlen_attn).takes or torch.__version__ < "2.13"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["standard", "gqa_scaled", "decoupled", "latent", "window"])
def test_on_the_gpu_it_equals_the_mask(name: str) -> None:
    device = torch.device("cuda")
    kernel = find_kernel(device)
    assert isinstance(kernel, VarlenKernel), kernel
    model = lively(spec(attention(name), max_positions=12)).to(device, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    tokens = torch.randint(VOCAB, IDS.shape, generator=torch.Generator().manual_seed(1)).to(device)
    ids = IDS.to(device)
    expected = exact(tokens, documents=ids)
    theirs = torch.autograd.grad(expected.square().mean(), list(exact.parameters()))
    with attention_backends(device, AttentionChoice(None, False, "test")), Calls("_varlen_attn") as calls:
        out = model(tokens, documents=ids)
        ours = torch.autograd.grad(out.float().square().mean(), list(model.parameters()))
    assert calls.count >= 1
    for one, other in zip((out, *ours), (expected, *theirs), strict=True):
        assert float((one.float() - other).norm()) <= 0.05 * float(other.norm()) + 1e-3
