"""Attaches the launchers of caramba.kernels.triton and caramba.kernels.metal to the ops."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from caramba.console import logger
from caramba.errors import ConfigError, KernelUnavailable
from caramba.ops.backend import (
    METAL_AVAILABLE,
    REFERENCE,
    TRITON_AVAILABLE,
    Op,
    all_ops,
    attach,
    found_compiler,
    fused_decode_available,
    get_backend_info,
)

__all__ = [
    "METAL_AVAILABLE",
    "TRITON_AVAILABLE",
    "fused_decode_available",
    "get_backend_info",
    "load",
    "uses_reference",
]

BACKENDS = {"cuda": "triton", "mps": "metal"}
Policy = Literal["auto", "require", "reference"]
_logged: set[str] = set()
_policies: dict[str, Policy] = {}
"""What was asked for last, by type of device."""


def load(device: torch.device | str, policy: Policy = "auto") -> dict[str, str]:
    """Attach the kernels of a type of device, before compilation, and return op -> backend.

    `reference` attaches nothing; kernels that this process attached before stay attached, with one warning. `auto` runs
    the reference of an op without a launcher or whose launcher does not build, and logs it once. Calling it again is
    harmless.

    Raises:
        KernelUnavailable: under `require`, when an op would run its reference.
        ConfigError: another policy.
    """
    if policy not in get_args(Policy):
        raise ConfigError(f"kernels: got {policy!r}, expected one of: {', '.join(get_args(Policy))}")
    kind = torch.device(device).type
    _policies[kind] = policy
    missing = {} if policy == "reference" else _attach_all(kind)
    chosen: dict[str, str] = get_backend_info(device)["ops"]
    if policy == "require" and missing:
        op, reason = next(iter(missing.items()))
        raise KernelUnavailable(
            f"kernels: require on {kind}: {len(missing)} of {len(chosen)} ops have no kernel, {op} because {reason}; "
            "use kernels: auto"
        )
    if policy == "auto" and kind in BACKENDS and missing and kind not in _logged:
        _logged.add(kind)
        reasons = set(missing.values())
        shared = f": {reasons.pop()}" if len(reasons) == 1 and len(missing) == len(chosen) else ""
        logger.info(f"kernels on {kind}: {', '.join(missing)} run the {REFERENCE} implementation{shared}")
    kept = [op for op, backend in chosen.items() if backend != REFERENCE]
    if policy == "reference" and kept and (message := f"{kind}, {policy}") not in _logged:
        _logged.add(message)
        logger.warning(
            f"kernels: reference on {kind}: {len(kept)} ops keep the kernels that this process attached before; "
            "use a process of its own"
        )
    return chosen


def uses_reference(device: torch.device | str) -> bool:
    """True if `kernels: reference` was asked for on this type of device last."""
    return _policies.get(torch.device(device).type) == "reference"


def _attach_all(kind: str) -> dict[str, str]:
    """Attach every launcher of a device type; return the ops left over, with the reason."""
    backend = BACKENDS.get(kind)
    ops = all_ops()
    if backend is None:
        return dict.fromkeys(ops, f"there are no kernels for {kind}")
    if not {"triton": TRITON_AVAILABLE, "metal": METAL_AVAILABLE}[backend]:
        return dict.fromkeys(ops, f"{backend} is not available")
    if backend == "metal" and not hasattr(torch.mps, "compile_shader"):
        return dict.fromkeys(
            ops, f"torch {torch.__version__} has no torch.mps.compile_shader; install torch 2.7 or later"
        )
    missing: dict[str, str] = {}
    for name, op in ops.items():
        try:
            launcher = find_launcher(op, backend)
        except KernelUnavailable as error:
            missing[name] = str(error)
        except Exception as error:  # a kernel that cannot be built is reported with its op, never ignored
            missing[name] = f"{type(error).__name__}: {error}"
        else:
            attach(name, kind, backend, launcher)
    if backend == "triton" and "dba_decode" not in missing and torch.cuda.is_available():
        _find_nvrtc()
        _adopt_tuned(torch.device("cuda"))
    return missing


def find_launcher(op: Op, backend: str) -> Callable[..., Any]:
    """Return the function of the op's name from the kernel file of that name.

    Else from the file of the op whose backward or in-place form it is, or of its contract's name.

    Raises:
        KernelUnavailable: neither file has one.
    """
    for name in (op.name, op.name.removesuffix("_").removesuffix("_backward"), op.module.rpartition(".")[2]):
        place = f"caramba.kernels.{backend}.{name}"
        if importlib.util.find_spec(place) is not None:
            launcher = getattr(importlib.import_module(place), op.name, None)
            if launcher is not None:
                return _or_reference(op, launcher) if backend == "metal" else launcher
    raise KernelUnavailable(f"{backend} has no launcher for it")


def _or_reference(op: Op, launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Return a launcher that runs the reference where Metal's launcher takes no such call, or its source does not
    compile: that warns once.

    Raises:
        KernelUnavailable: at a call, a source that does not compile under `kernels: require`.
    """
    library = importlib.import_module("caramba.kernels.metal.library")

    def run(*args: Any, **options: Any) -> Any:
        try:
            found = launcher(*args, **options)
        except library.CompileError as error:
            reason = f"{op.name}: {error}"
            if _policies.get("mps") == "require":
                raise KernelUnavailable(
                    f"{reason}; use kernels: auto, which runs the reference implementation"
                ) from error
            if reason not in _logged:
                _logged.add(reason)
                logger.warning(f"{reason}; the {REFERENCE} implementation runs instead")
            return op.reference(*args)
        return op.reference(*args) if found is NotImplemented else found

    return run


def _find_nvrtc() -> None:
    """Tell the kernels in CUDA C++ where to keep what they compile; say once where they have no compiler."""
    from caramba.runs.files import home

    nvrtc = importlib.import_module("caramba.kernels.cuda.nvrtc")
    nvrtc.keep_in(home() / "cubins")
    version: str | None = nvrtc.version()
    found_compiler("nvrtc", version)
    if version is None and "nvrtc" not in _logged:
        _logged.add("nvrtc")
        logger.info(
            "kernels on cuda: NVRTC is not found (pip install nvidia-cuda-nvrtc), decode on quantised caches and INT4 "
            "weights run Triton's kernels"
        )


def _adopt_tuned(device: torch.device) -> None:
    """Hand what `caramba tune` measured to the decode kernel.

    Raises:
        ConfigError: entries that this version's kernel does not know.
    """
    from caramba.runtime import tuned

    table = importlib.import_module("caramba.kernels.triton.dba_decode_table")
    try:
        table.load_tuned(tuned.decode_choices(device))
        importlib.import_module("caramba.kernels.triton.dba_decode").forget_plans()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{tuned.tuning_path()}: decode choices are not of this version ({error}); "
            "delete it, or run caramba tune again"
        ) from None
