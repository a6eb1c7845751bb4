"""Decode attention of a latent with its heads' values: the op's contract, and that it is the two ops one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops import dba_decode, dba_decode_up
from caramba.ops.head_values import reference_head_values
from tests.ops.decode_cases import Case, arguments

CASE = Case(("q4_0", "q8_0"), (105, 0, 70), heads=(4, 1), dims=(64, 32, 64), queries=2, packed=64, window=50)


def mapped(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[object], dict[str, object], Tensor]:
    args, options = arguments(case, dtype)
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(case.heads[0], case.dims[0], 24, generator=generator).to(dtype)
    return [*args[:4], args[5], up], options, up


@pytest.mark.parametrize("case", [CASE, Case(("fp32", "fp32"), (9, 4), heads=(3, 1), dims=(16, 8, 16))])
def test_it_is_the_values_of_what_decode_attention_reads(case: Case) -> None:
    given, options, up = mapped(case)
    args, _ = arguments(case, torch.float64)
    read, _ = dba_decode(*args, **options)
    found = dba_decode_up(*given, **options)  # type: ignore[arg-type]
    assert found.is_contiguous()
    torch.testing.assert_close(found, reference_head_values(read.transpose(1, 2), up), rtol=0, atol=0)


def test_the_op_keeps_its_contract() -> None:
    q_sem, q_geo, sem, geo, lengths, up = mapped(CASE)[0]
    kinds = [sem.kind, geo.kind]  # type: ignore[attr-defined]
    parts = sem.tensors, geo.tensors  # type: ignore[attr-defined]
    packed = torch.tensor([64], dtype=torch.int32)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    op = torch.ops.caramba.dba_decode_up.default
    with torch.no_grad():
        torch.library.opcheck(op, (q_sem, q_geo, kinds, *parts, lengths, packed, up, 50, 0), test_utils=tests)


def test_bad_input_is_refused() -> None:
    given, options, up = mapped(CASE)
    with pytest.raises(
        ConfigError, match=r"dba_decode_up: v_up is \(3, 64, 24\) on cpu, expected \[4, 64, D\]"
    ):
        dba_decode_up(*given[:5], up[1:], **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dba_decode_up: got inputs that require gradients"):
        dba_decode_up(*given[:5], up.clone().requires_grad_(), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dba_decode"):
        dba_decode_up(given[0], given[1][..., :3], *given[2:], **options)  # type: ignore[arg-type, index]
