"""Cached decoding through `dba_decode`, which reads the stored format, equals the full forward and the other path."""

from __future__ import annotations

import pytest
import torch
from model_specs import ATTENTION, DECOUPLED, VOCAB, transformer
from torch import Tensor

from caramba import ops
from caramba.cache import KVCacheKind, new_layer_cache
from caramba.cache import view as cache_view
from caramba.config.layer import AttentionLayerConfig
from caramba.errors import CacheFull
from caramba.lower.decode_attention import log_unfused_decode
from caramba.lower.lowering import lower
from caramba.model import Model, build_model
from caramba.ops import backend
from caramba.ops.dba_decode import WIDEST, dba_decode

N_TOKENS, TILE = 21, 4
# First tokens kept exact have keys of another shape, which no kernel reads: such a layer takes the plain path.
PLAIN = [name for name in ATTENTION if "exact_first_tokens" in ATTENTION[name]]
FUSED = [name for name in ATTENTION if name.startswith(("decoupled", "latent")) and name not in PLAIN]
FUSED.append("decoupled_null")
# Keys of one part are read by the op as blocks alone.
BLOCKS_ALONE = [name for name in ATTENTION if not name.startswith(("decoupled", "latent", "no_rope"))] + ["null"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a CPU take the fused path, where the op runs its reference; returns the queries of every call."""
    seen: list[int] = []

    def counted(q_sem: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor]:
        seen.append(q_sem.shape[2])
        return dba_decode(q_sem, *args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setitem(backend._attached, ("dba_decode", "cpu"), "forced")
    monkeypatch.setitem(WIDEST, torch.float64, 64)
    monkeypatch.setattr(cache_view, "dba_decode", counted)
    return seen


@pytest.fixture(autouse=True)
def null_keys_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION, "decoupled_null", {**DECOUPLED, "null_attn": True})
    one_part = {"n_heads": 4, "n_kv_heads": 2, "mode": "gqa", "null_attn": True}
    monkeypatch.setitem(ATTENTION, "null", one_part)


def lively(name: str) -> Model:
    model = build_model(transformer(name), seed=0).eval().double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def tokens_of() -> Tensor:
    return torch.randint(VOCAB, (2, N_TOKENS), generator=torch.Generator().manual_seed(1))


def decoded(model: Model, kind: KVCacheKind, cuts: list[int], *, static: bool = False) -> Tensor:
    ctx = model.new_context(2, N_TOKENS, kind, tail_tokens=TILE, static=static)
    with lower(model, "cpu", "decode"):
        return torch.cat([model(part, ctx) for part in torch.tensor_split(tokens_of(), cuts, dim=1)], dim=1)


@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_fused_decode_equals_the_full_forward(name: str, calls: list[int]) -> None:
    model = lively(name)
    full = model(tokens_of())
    for cuts, static in (([10, 11, 12, 15, 20], False), ([1, 9], True)):
        calls.clear()
        out = decoded(model, KVCacheKind.FP32, cuts, static=static)
        torch.testing.assert_close(out, full, rtol=2e-5, atol=2e-5)
        assert set(calls) == ({1, 3, 5} if len(cuts) > 2 else {1, 8})


@pytest.mark.parametrize("kind", [KVCacheKind.Q8_0, KVCacheKind.NF4, KVCacheKind.MIXED])
@pytest.mark.parametrize("name", BLOCKS_ALONE)
@torch.no_grad()
def test_blocks_of_keys_in_one_part_are_read_as_they_are(name: str, kind: KVCacheKind, calls: list[int]) -> None:
    model, cuts = lively(name), [10, 11, 12, 15, 20]
    torch.testing.assert_close(decoded(model, KVCacheKind.FP32, cuts), model(tokens_of()), rtol=2e-5, atol=2e-5)
    assert not calls
    fused = decoded(model, kind, cuts)
    assert set(calls) == {1, 3, 5}
    with pytest.MonkeyPatch.context() as undone:
        undone.delitem(backend._attached, ("dba_decode", "cpu"))
        plain = decoded(model, kind, cuts)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_first_tokens_keep_to_the_plain_path(name: str, calls: list[int]) -> None:
    model = lively(name)
    torch.testing.assert_close(decoded(model, KVCacheKind.FP32, [10, 11, 15]), model(tokens_of()), rtol=2e-5, atol=2e-5)
    assert not calls


@pytest.mark.parametrize("kind", [KVCacheKind.BF16, KVCacheKind.Q8_0, KVCacheKind.NF4, KVCacheKind.MIXED])
@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_fused_decode_equals_dequantise_then_attend(name: str, kind: KVCacheKind, calls: list[int]) -> None:
    model, cuts = lively(name), [10, 11, 12, 15, 20]
    fused = decoded(model, kind, cuts)
    assert calls
    n_calls = len(calls)
    with pytest.MonkeyPatch.context() as undone:
        undone.delitem(backend._attached, ("dba_decode", "cpu"))
        plain = decoded(model, kind, cuts)
    assert len(calls) == n_calls
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("reason", ["width", "dtype"])
def test_what_the_kernels_cannot_do_takes_the_plain_path(
    reason: str, calls: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = lively("latent")
    if reason == "width":
        monkeypatch.setitem(WIDEST, torch.float64, 2)
    else:
        monkeypatch.delitem(WIDEST, torch.float64)
    log_unfused_decode.cache_clear()
    out, full = decoded(model, KVCacheKind.FP32, [10, 11, 15]), model(tokens_of())
    torch.testing.assert_close(out, full, rtol=2e-5, atol=2e-5)
    assert not calls
    assert "no kernel for torch.float64" in "".join(capsys.readouterr())


@torch.no_grad()
def test_rollback_reorder_and_overflow_on_the_fused_path(calls: list[int]) -> None:
    model, tokens = lively("latent"), tokens_of()
    lower(model, "cpu", "decode")
    ctx = model.new_context(2, N_TOKENS, KVCacheKind.FP32)
    model(tokens[:, :15], ctx)
    expected = model(tokens[:, 15:18], ctx)
    ctx.truncate(15)
    ctx.select(torch.tensor([1]))
    torch.testing.assert_close(model(tokens[1:, 15:18], ctx), expected[1:], rtol=1e-9, atol=1e-9)
    ctx.select(torch.tensor([0, 0, 0]))
    again = model(tokens[1:, 18:21].expand(3, -1), ctx)
    torch.testing.assert_close(again[0], again[2])
    bytes_before = ctx.used_bytes()
    with pytest.raises(CacheFull, match=r"22 tokens do not fit max_tokens=21"):
        model(tokens[1:, :1].expand(3, -1), ctx)
    ctx.begin()
    assert (ctx.position, ctx.used_bytes()) == (21, bytes_before)
    assert calls


def test_only_caches_that_the_op_reads_are_fused(calls: list[int]) -> None:
    def cache(**options: object):
        hadamard = bool(options.pop("hadamard", False))
        kind = options.pop("kind", KVCacheKind.MIXED)
        assert isinstance(kind, KVCacheKind)
        config = AttentionLayerConfig.model_validate({"d_model": 16, "n_heads": 2, **options})
        return new_layer_cache(config.dims(), 1, 8, kind, hadamard=hadamard)

    decoupled = {"mode": "decoupled", "sem_dim": 4, "geo_dim": 4}
    assert ops.fused_decode_available(cache(), "cpu")
    assert not ops.fused_decode_available(cache(hadamard=True), "cpu")
    assert not ops.fused_decode_available(cache(kind=KVCacheKind.BF16), "cpu")
    assert ops.fused_decode_available(cache(**decoupled), "cpu")
    assert not ops.fused_decode_available(cache(**decoupled), "cuda")
    assert not ops.fused_decode_available(cache(**decoupled, hadamard=True), "cpu")
