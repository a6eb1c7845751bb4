"""The kernel that joins splits and maps what heads have read, against the two ops in float64: in the interpreter on a
CPU, by `test_in_the_interpreter.py`, and as compiled on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from caramba.ops import dba_decode_up
from caramba.ops.head_values import reference_head_values
from tests.ops.decode_cases import Case, arguments, expected
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
MIXED = Case(("q4_0", "q8_0"), (130,), heads=(4, 1), dims=(128, 64, 128), packed=64)
CASES = {
    "one row, many splits": Case(("fp16", "fp16"), (250,), heads=(3, 1), dims=(48, 24, 48)),
    "one row, mixed": MIXED,
    "some rows, one empty": Case(("fp16", "fp16"), (70, 0, 3), heads=(2, 1), dims=(64, 32, 64), queries=2),
    "tiles of rows": Case(("fp16", "fp16"), (70, *range(16)), heads=(2, 1), dims=(64, 32, 64), capacity=96),
}
LARGE = {
    "32 sequences": Case(("bf16", "bf16"), (2000,) * 32, heads=(32, 1), dims=(128, 64, 128), capacity=2048),
    "a long one": Case(("bf16", "bf16"), (30000,), heads=(32, 1), dims=(128, 256, 128), capacity=30720),
}


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("dba_decode", "dba_decode_up", "head_products")


@pytest.mark.parametrize("n_splits", [0, 3, 70])
@pytest.mark.parametrize("name", [*CASES, *(LARGE if HAS_GPU else {})])
@torch.no_grad()
def test_against_float64(name: str, n_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from caramba.kernels.triton import dba_decode as decode

    case = (CASES | LARGE)[name]
    if n_splits:
        chosen = decode.choose
        monkeypatch.setattr(
            decode,
            "choose",
            lambda *given: decode.replace(chosen(*given), n_splits=n_splits, early_join=n_splits > 3),
        )
    decode.forget_plans()
    for dtype in (torch.float16, *([torch.bfloat16] if HAS_GPU else [])):
        args, options = arguments(case, dtype, DEVICE)
        generator = torch.Generator().manual_seed(1)
        up = torch.randn(case.heads[0], case.dims[0], 40, generator=generator).to(DEVICE, dtype)
        found = dba_decode_up(*args[:4], args[5], up * case.dims[0] ** -0.5, **options)
        assert found.is_contiguous()
        read = expected(case, args, options)[0] if name in CASES else _read(case, args, options)
        wanted = reference_head_values(read.transpose(1, 2), (up * case.dims[0] ** -0.5).double().cpu())
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=8 * eps, atol=8 * eps)
    decode.forget_plans()


def _read(case: Case, args: list[object], options: dict[str, object]) -> torch.Tensor:
    """Return what heads read in float64, by the reference on the device: large cases take `expected` minutes."""
    from caramba.ops.decode_reference import reference_dba_decode

    q_sem, q_geo, sem, geo, _, lengths = args
    given = [x.double() for x in (q_sem, q_geo)]  # type: ignore[attr-defined]
    parts = [[part.double() for part in stream.tensors] for stream in (sem, geo)]  # type: ignore[attr-defined]
    kinds = ["fp32", "fp32"]
    read, _ = reference_dba_decode(*given, kinds, *parts, [], lengths, None, [], 0, 0, 0)
    return read.cpu()


def test_without_kernels_or_rows_nothing_is_launched() -> None:
    case = CASES["some rows, one empty"]
    args, options = arguments(case, torch.float32, DEVICE)
    up = torch.ones(2, 64, 8, device=DEVICE)
    with torch.no_grad():
        wide = dba_decode_up(*args[:4], args[5], up, **options)
    assert wide.dtype == torch.float32  # by the reference: its product would be tf32
    assert wide.shape == (3, 2, 2, 8)
