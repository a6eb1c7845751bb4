"""Storing the sampled tokens of a decode step where later steps and the host read them: the op of `store_sample`."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct


def store_sample(
    token: Tensor, logprob: Tensor, step: Tensor, tokens: Tensor, logprobs: Tensor, fed: Tensor
) -> None:
    """Write the tokens of all rows and their log-probabilities into column `step`, which is counted on, and into `fed`.

    Columns end at N: from there on the last one is written again.

    Shape: token int64 [B], logprob float32 [B], step int64 [], tokens int64 [B, N], logprobs float32 [B, N], fed
    int64 [B], all contiguous; nothing is returned.

    Raises:
        ConfigError: shapes, dtypes, strides or devices that do not fit.
    """
    given = {
        "logprob": (logprob, torch.float32, token.shape),
        "step": (step, torch.int64, ()),
        "tokens": (tokens, torch.int64, (*token.shape, *tokens.shape[-1:])),
        "logprobs": (logprobs, torch.float32, tokens.shape),
        "fed": (fed, torch.int64, token.shape),
        "token": (token, torch.int64, token.shape[:1]),
    }
    for name, (x, dtype, shape) in given.items():
        if x.dtype != dtype or tuple(x.shape) != tuple(shape) or x.device != token.device:
            raise ConfigError(
                f"store_sample: {name} is {x.dtype} {tuple(x.shape)} on {x.device}, expected {dtype} {tuple(shape)} on "
                f"{token.device}"
            )
        if not x.is_contiguous() or (name == "tokens" and not x.shape[-1]):
            raise ConfigError(
                f"store_sample: {name} has shape {tuple(x.shape)} and strides {x.stride()}, expected contiguous columns"
            )
    run = direct("store_sample", token, logprob, step, tokens, logprobs, fed)
    (run or torch.ops.caramba.store_sample.default)(token, logprob, step, tokens, logprobs, fed)


@caramba_op("store_sample", mutates=("step", "tokens", "logprobs", "fed"))
def reference_store_sample(
    token: Tensor, logprob: Tensor, step: Tensor, tokens: Tensor, logprobs: Tensor, fed: Tensor
) -> None:
    """Compute the op in plain PyTorch."""
    at = step.clamp(max=tokens.shape[1] - 1).view(1)
    tokens.index_copy_(1, at, token[:, None])
    logprobs.index_copy_(1, at, logprob[:, None])
    fed.copy_(token)
    step += 1
