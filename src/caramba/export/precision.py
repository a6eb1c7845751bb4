"""The number format that an export's weights are written in."""

import torch
from torch import Tensor

from caramba.errors import ConfigError, nearest

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ALIASES = {"fp32": "float32", "bfloat16": "bf16", "float16": "fp16"}
KEPT_SUFFIX = "inv_freq"  # half precision cannot hold an angle


def check_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        ConfigError: unknown, with the nearest name.
    """
    chosen = _ALIASES.get(name, name)
    if chosen not in DTYPES:
        hint = nearest(name, [*DTYPES, *_ALIASES]) or ";"
        raise ConfigError(f"export: --dtype {name!r} is unknown{hint} dtypes: {', '.join(DTYPES)}")
    return DTYPES[chosen]


def in_dtype(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return every floating tensor rounded to `dtype`, as it is where that is None; RoPE frequencies stay float32.

    Raises:
        ConfigError: a weight that `dtype` cannot hold.
    """
    if dtype is None:
        return tensors
    return {name: round_to(name, tensor, dtype) for name, tensor in tensors.items()}


def round_to(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return one tensor as `in_dtype` does.

    Raises:
        ConfigError: `dtype` cannot hold a value.
    """
    if dtype is None or not tensor.is_floating_point() or name.endswith(KEPT_SUFFIX):
        return tensor
    rounded = tensor.to(dtype)
    if tensor.numel() and tensor.isfinite().all() and not rounded.isfinite().all():
        raise ConfigError(
            f"export: {name} holds {tensor.abs().max().item():.4g}, and the largest number of "
            f"{str(dtype).removeprefix('torch.')} is {torch.finfo(dtype).max:.4g}; use --dtype bf16 or float32"
        )
    return rounded
