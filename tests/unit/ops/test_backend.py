"""Which implementation runs: the reference while nothing is attached, said honestly."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba import kernels
from caramba.cache import new_layer_cache
from caramba.config.layer import AttentionLayerConfig
from caramba.errors import ConfigError, KernelUnavailable
from caramba.ops import backend, get_backend_info
from caramba.ops.backend import all_ops, caramba_op
from caramba.ops.formats import quantize


def test_without_launchers_every_op_runs_its_reference() -> None:
    assert kernels.load("cpu") == dict.fromkeys(all_ops(), "reference")
    assert kernels.load("cuda", "reference") == dict.fromkeys(all_ops(), "reference")
    info = get_backend_info("cpu")
    assert info["ops"] == dict.fromkeys(all_ops(), "reference")
    assert (info["triton"] is not None) == kernels.TRITON_AVAILABLE
    cache = new_layer_cache(AttentionLayerConfig(d_model=16, n_heads=2).dims(), 1, 8)
    assert kernels.fused_decode_available(cache, "cuda") is False


def test_a_compiler_that_is_not_found_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvrtc = importlib.import_module("caramba.kernels.cuda.nvrtc")
    monkeypatch.setattr(nvrtc, "_folder", None)
    monkeypatch.setattr(backend, "_compilers", {})
    monkeypatch.setattr(kernels, "_logged", set())
    assert get_backend_info("cpu")["nvrtc"] is None
    said: list[str] = []
    monkeypatch.setattr(kernels.logger, "info", said.append)
    for version in (None, None, "13.0"):
        monkeypatch.setattr(nvrtc, "version", lambda version=version: version)
        kernels._find_nvrtc()
        assert get_backend_info("cpu")["nvrtc"] == version
    assert len(said) == 1
    assert "NVRTC is not found (pip install nvidia-cuda-nvrtc)" in said[0]
    assert nvrtc._folder is not None
    assert nvrtc._folder.name == "cubins"


def test_require_says_what_is_missing() -> None:
    n_ops, first = len(all_ops()), next(iter(all_ops()))
    with pytest.raises(
        KernelUnavailable,
        match=rf"require on cpu: {n_ops} of {n_ops} ops have no kernel, {first} because there",
    ):
        kernels.load("cpu", "require")
    assert kernels.load("cpu", "reference") == dict.fromkeys(all_ops(), "reference")


def test_reference_after_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher does not give a launcher back: who asked for the reference learns that it is not what runs."""
    monkeypatch.setattr(backend, "_attached", {("quantize", "cuda"): "triton", ("rope", "cuda"): "triton"})
    monkeypatch.setattr(kernels, "_logged", set())
    said: list[str] = []
    monkeypatch.setattr(kernels.logger, "warning", said.append)
    for _ in range(2):
        assert kernels.load("cuda", "reference")["quantize"] == "triton"
    assert kernels.load("cpu", "reference")["quantize"] == "reference"
    assert said == [
        "kernels: reference on cuda: 2 ops keep the kernels that this process attached before; use a process of its own"
    ]
    with pytest.raises(ConfigError, match="kernels: got 'fast', expected one of: auto, require, reference"):
        kernels.load("cpu", "fast")  # pyright: ignore[reportArgumentType]


def test_attach_refuses_what_has_no_contract_and_a_second_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelUnavailable, match=r"op 'flash' on 'cuda': no such contract"):
        backend.attach("flash", "cuda", "triton", quantize)
    monkeypatch.setitem(backend._attached, ("quantize", "cuda"), "triton")
    backend.attach("quantize", "cuda", "triton", quantize)  # again: nothing happens
    with pytest.raises(KernelUnavailable, match=r"triton is attached, cannot attach other"):
        backend.attach("quantize", "cuda", "other", quantize)
    assert get_backend_info("cuda")["ops"]["quantize"] == "triton"


def test_comparisons_leave_out_some_kernels_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("quantize", "rope"):
        monkeypatch.setitem(backend._attached, (op, "cpu"), "triton")
    x = torch.ones(1)
    for left_out, expected in ((("rope",), (True, False)), ((), (False, False))):
        with backend.without_kernels(*left_out):
            assert (backend.has_kernel("quantize", x), backend.has_kernel("rope", x)) == expected
        assert backend.has_kernel("rope", x)


def test_an_attached_launcher_runs() -> None:
    calls: list[torch.Size] = []

    def launcher(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(x.shape)
        return reference_quantize(x, kind)

    from caramba.ops.formats import reference_quantize

    library = torch.library.Library("caramba", "IMPL")
    library.impl("quantize", launcher, "CPU")
    try:
        quantize(torch.ones(2, 32), "q8_0")
    finally:
        library._destroy()
    assert calls == [(2, 32)]
    quantize(torch.ones(2, 32), "q8_0")
    assert len(calls) == 1


def test_a_registered_op_has_schema_fake_and_gradient() -> None:
    """What `caramba_op` registers passes torch's own checks of an op."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.times = inputs[1]

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.times, None

    @caramba_op("times_for_tests", fake=lambda x, times: torch.empty_like(x), setup=setup, backward=backward)
    def reference_times(x: torch.Tensor, times: int) -> torch.Tensor:
        return x * times

    try:
        op = torch.ops.caramba.times_for_tests.default
        assert str(op._schema) == "caramba::times_for_tests(Tensor x, int times) -> Tensor"
        torch.library.opcheck(op, (torch.randn(3, requires_grad=True), 4))
        assert all_ops()["times_for_tests"].module == __name__
    finally:
        backend._ops.pop("times_for_tests")


def test_every_kernel_file_names_an_op_or_serves_one_that_does() -> None:
    pytest.importorskip("triton")
    folder = Path(importlib.import_module("caramba.kernels.triton").__path__[0])
    ops = all_ops()
    homes = set()
    for op in ops.values():
        with contextlib.suppress(KernelUnavailable):  # an op whose reference is all there is
            homes.add(kernels.find_launcher(op, "triton").__module__.rpartition(".")[2])
    assert len(homes) > 20
    names = {"scale", *ops, *(op.module.rpartition(".")[2] for op in ops.values())}
    assert homes <= names
    imports = {
        file.stem: set(re.findall(r"(?:from|import) caramba\.kernels\.triton\.(\w+)", file.read_text()))
        for file in folder.glob("*.py")
        if file.stem != "__init__"
    }
    used = set(homes)
    while more := set().union(*(imports[name] for name in used)) - used:
        used |= more
    assert set(imports) == used, "kernel files that no op runs"


def test_an_op_without_a_kernel_file_is_reported() -> None:
    op = all_ops()["quantize"]
    with pytest.raises(KernelUnavailable, match="metal has no launcher for it"):
        kernels.find_launcher(op, "metal")
