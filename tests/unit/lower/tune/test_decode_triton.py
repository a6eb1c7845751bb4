"""Ways to cut decode attention are timed and taken over, with the kernel in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from caramba.lower.tune import decode
from caramba.lower.tune.decode import DecodeCase, _call, _copies, tune_case, tune_decode
from caramba.lower.tune.timing import Timed, time_interleaved
from caramba.ops.dba_decode import ZEROS, StoredStream, dba_decode
from caramba.ops.formats import STORED

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's process")
if os.environ.get("TRITON_INTERPRET") == "1":
    from caramba.kernels.triton.dba_decode_table import DecodeConfig
CPU = torch.device("cpu")
LATENT = DecodeCase(("fp32", "fp32"), (16, 16, 16), batch=1, tokens=40, n_heads=2)
PER_HEAD = DecodeCase(("q4_0", "q8_0", "fp32"), (16, 16, 32), batch=2, tokens=32, n_heads=4, n_kv_heads=2)
ONE_PART = DecodeCase(("q8_0", ZEROS, "q4_0"), (32, 16, 32), batch=1, tokens=32, n_heads=4, n_kv_heads=2)


def test_what_was_fastest_is_what_the_kernel_takes() -> None:
    from caramba.kernels.triton.dba_decode_table import (
        DecodeConfig,
        DecodeShape,
        candidates,
        choose,
        load_tuned,
    )

    assert list(tune_case(PER_HEAD, CPU, 0.0)) == ["interpreter|q4_0+q8_0+fp32|16x16x32|2|4|32"]
    assert list(tune_case(ONE_PART, CPU, 0.0)) == ["interpreter|fp32:q8_0+zeros+q4_0|32x16x32|2|2|32"]
    found = tune_decode(CPU, 0.2, [LATENT, PER_HEAD])
    key = next(iter(found))
    assert key == "interpreter|fp32+fp32|16x16x16|2|1|64", key
    shape = DecodeShape("interpreter", ("fp32", "fp32"), (16, 16, 16), 2, 1, 40)
    assert DecodeConfig(**found[key]) in candidates(shape, 4)
    other = {**found[key], "n_splits": 3, "n_warps": 8}
    load_tuned({key: other})
    assert choose(shape, 4) == DecodeConfig(**other)


@pytest.mark.parametrize("case", [LATENT, PER_HEAD, ONE_PART], ids=["latent", "per head", "one part"])
@pytest.mark.parametrize("is_any_right", [True, False])
def test_a_way_that_is_wrong_is_not_taken(
    case: DecodeCase,
    is_any_right: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from caramba.kernels.triton import dba_decode as launcher
    from caramba.kernels.triton import dba_decode_table as table

    right, ways, tried = launcher.launch, table.candidates, []
    monkeypatch.setattr(table, "candidates", lambda *given: ways(*given)[:2])

    def launch(way: object, *given: object) -> tuple[torch.Tensor, ...]:
        tried.append(way)
        out, sums = right(way, *given)
        is_right = is_any_right and way == tried[0]
        return out if is_right else out + 0.1 * out.norm() / out.numel() ** 0.5, sums

    def in_turn(timed: list[Timed], *_: object, **__: object) -> tuple[dict[str, list[float]], dict[str, str]]:
        for one in timed:
            one.call()
        return {one.name: [float(place)] for place, one in enumerate(reversed(timed))}, {}

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(decode, "time_interleaved", in_turn)  # the later way is the faster one
    found = tune_case(case, CPU, 0.0)
    assert len(set(tried)) == 2
    assert [DecodeConfig(**way) for way in found.values()] == ([tried[0]] if is_any_right else [])
    if not is_any_right:
        assert "is off by 1.0e-01 of what the reference gives and is not taken" in capsys.readouterr().err


def test_a_way_that_the_gpu_lacks_resources_for_is_refused() -> None:
    from triton.runtime.errors import OutOfResources

    def launch(*_: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    timed = [Timed("large", _call(launch, None, [[]]))]
    times, refused = time_interleaved(timed, CPU, 0.0, least=1)
    assert not times
    assert "out of resource: shared memory, Required: 300000" in refused["large"]


@pytest.mark.parametrize("case", [LATENT, PER_HEAD, ONE_PART], ids=["latent", "per head", "one part"])
def test_the_op_takes_what_is_timed(case: DecodeCase) -> None:
    q_sem, q_geo, kinds, *streams, seqlens, packed = _copies(case, CPU)[0]
    stored = [StoredStream(kind, *parts) for kind, parts in zip(kinds, streams, strict=False)]
    stored += [None] * (3 - len(stored))
    out, _ = dba_decode(q_sem, q_geo, *stored, seqlens, n_packed=packed)
    assert out.isfinite().all()
    assert (packed is None) == all(kind not in STORED for kind in kinds)
