"""Sampling: a token and its log-probability from rows of logits, the likeliest token, storing of samples."""

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct, empty_upcast, upcast


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token per row z from softmax(z / temperature), and return it with its log-probability.

    `draw` selects the token by `uniform`. At temperature 0 it is argmax z, of equals the first. The log-probability is
    log softmax(z) there in float32, which is NaN where z contains NaN.

    Shape: logits [B, V], temperature and uniform [B], both float64 or, where a device has no other, float32, to int64
    [B] and float32 [B].

    Raises:
        ConfigError: logits that are not floating [B, V] with V at least 1, or settings of other shapes, dtypes or
            devices.
    """
    wide = temperature.dtype
    is_wide = wide == uniform.dtype and wide in (torch.float64, torch.float32)
    is_wide = is_wide and temperature.device == uniform.device == logits.device
    if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
        raise ConfigError(
            f"sample: logits are {logits.dtype} of shape {tuple(logits.shape)}, expected floating [B, V], V >= 1"
        )
    if not is_wide or temperature.shape != logits.shape[:1] or uniform.shape != logits.shape[:1]:
        raise ConfigError(
            f"sample: temperature and uniform are {wide} {tuple(temperature.shape)} on {temperature.device} and "
            f"{uniform.dtype} {tuple(uniform.shape)} on {uniform.device}, expected "
            f"float64 [{logits.shape[0]}] on {logits.device}"
        )
    if logits.dtype == torch.float64 or wide != torch.float64:  # no kernel takes it
        return reference_sample(logits, temperature, uniform)
    return (direct("sample", logits) or torch.ops.caramba.sample.default)(logits, temperature, uniform)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at `uniform` by the inverse cumulative distribution.

    One number in [0, 1) decides, so the same number gives the same token on any device and in any batch. A token of
    probability 0 is never sampled, and the probabilities need not sum to 1.

    Shape: probs [..., V] and uniform [...] to [...] int64.
    """
    cumulated = probs.cumsum(-1)
    total = cumulated[..., -1]
    # u * total can round up to the total, which no token's share holds.
    below = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(uniform.to(probs.dtype) * total, below)
    return (cumulated <= point[..., None]).sum(-1)


def _fake(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    n_rows = logits.shape[:1]
    return logits.new_empty(n_rows, dtype=torch.int64), logits.new_empty(n_rows, dtype=torch.float32)


@caramba_op("sample", fake=_fake)
def reference_sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    scores, is_greedy = logits.to(temperature.dtype), temperature == 0
    scale = torch.where(is_greedy, 1.0, temperature)[:, None]
    probs = ((scores - scores.amax(-1, keepdim=True)) / scale).softmax(-1)
    chosen = torch.where(is_greedy, scores.argmax(-1), draw(probs, uniform))
    # Where a logit is not a number no share holds anything.
    chosen = chosen.clamp(max=logits.shape[1] - 1)
    return chosen, logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def store_sample(token: Tensor, logprob: Tensor, step: Tensor, tokens: Tensor, logprobs: Tensor, fed: Tensor) -> None:
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


def argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (argmax z, log softmax(z) there) of every row z, of equals the first; the latter in at least fp32.

    log softmax(z)[argmax z] = -log(sum exp(z - max z)), which is NaN where z holds one. There are no gradients.

    Shape: logits [B, V] to int64 [B] and [B].

    Raises:
        ConfigError: logits that are not floating [B, V] with V at least 1.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
        raise ConfigError(
            f"argmax_logprob: logits are {logits.dtype} of shape {tuple(logits.shape)}, expected floating [B, V >= 1]"
        )
    if logits.requires_grad:
        logits = logits.detach()
    if logits.dtype == torch.float64:  # no kernel takes it
        return reference_argmax_logprob(logits)
    return (direct("argmax_logprob", logits) or torch.ops.caramba.argmax_logprob.default)(logits)


def _fake_argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    n_rows = logits.shape[:1]
    return logits.new_empty(n_rows, dtype=torch.int64), empty_upcast(logits, n_rows)


@caramba_op("argmax_logprob", fake=_fake_argmax_logprob)
def reference_argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    index = logits.argmax(-1, keepdim=True)
    return index.squeeze(1), upcast(logits).log_softmax(-1).gather(1, index).squeeze(1)
