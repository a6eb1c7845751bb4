"""The op `caramba::stochastic_round`: stochastic rounding of many float32 tensors to bfloat16."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct, has_kernel
from caramba.ops.philox import TILE, Piece, halves

CHUNK = 128 * TILE
"""Elements per step of the reference on a CPU, so that they fit its caches; 32 times as many on other devices, where
launches would take longer than the work. This bounds the memory of the reference."""


def stochastic_round(xs: Sequence[Tensor], outs: Sequence[Tensor], seed: Tensor, *, first: int = 0) -> None:
    """Round float32 to bfloat16 stochastically, so that the expected value is x.

    x is rounded to one of its two bfloat16 neighbours l, u: away from zero with probability
    (|x| - |l|) / (|u| - |l|), to within 2^-16. Values that bfloat16 represents, with zeros and infinities, do not
    change. The randomness is a function of `seed`, the tensor's number `first` + i and the element's position
    (`caramba.ops.philox.halves`). The call does not synchronise with the device.

    Shape: lists of one length; x float32 and out bfloat16 of one shape, contiguous, all on one device; seed [] int64
    there.

    Raises:
        ConfigError: other lists, shapes, strides, dtypes or devices.

    Reference: Zamirai et al., 2020, arXiv:2010.06192.
    """
    if len(xs) != len(outs):
        raise ConfigError(f"stochastic_round: {len(xs)} tensors into {len(outs)}; expected as many of both")
    if not xs:
        return
    check_seed("stochastic_round", seed, xs[0].device)
    for index, (x, out) in enumerate(zip(xs, outs, strict=True)):
        kinds = (x.dtype, out.dtype) == (torch.float32, torch.bfloat16)
        places = x.shape == out.shape and x.device == out.device == seed.device
        if not (kinds and places and x.is_contiguous() and out.is_contiguous()):
            raise ConfigError(
                f"stochastic_round: tensor {index} is {tuple(x.shape)} of {x.dtype} with strides {x.stride()} on "
                f"{x.device}, to {tuple(out.shape)} of {out.dtype} with {out.stride()} on {out.device}; expected "
                f"contiguous float32 to bfloat16 of its shape on {seed.device}"
            )
    run = None if torch.is_grad_enabled() else direct("stochastic_round", *xs)
    if not (has_kernel("stochastic_round", xs[0]) or torch.compiler.is_compiling()):
        # Not by the op: the dispatcher keeps a launcher that `without_kernels` has set aside.
        run = torch.no_grad()(reference_stochastic_round)
    elif run is None:
        run = torch.ops.caramba.stochastic_round.default
    else:  # as the op would, so that a backward through what has changed is refused
        torch.autograd.graph.increment_version(tuple(outs))
    run(list(xs), list(outs), seed, first)


def check_seed(op: str, seed: Tensor, device: torch.device) -> None:
    """Refuse a seed that is not one number on the device of what is rounded.

    Raises:
        ConfigError: it is another.
    """
    if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
        raise ConfigError(
            f"{op}: seed is {tuple(seed.shape)} of {seed.dtype} on {seed.device}; expected one int64 on {device}"
        )


@caramba_op("stochastic_round", mutates=("outs",))
def reference_stochastic_round(xs: list[Tensor], outs: list[Tensor], seed: Tensor, first: int) -> None:
    """Compute the op in plain PyTorch."""
    noise = chunk_noise(seed, first, [x.numel() for x in xs])
    for x, out in zip(xs, outs, strict=True):
        wide, narrow = x.view(-1), out.view(-1)
        for start, stop in chunks(x.numel(), x.device):
            narrow[start:stop] = round_with_noise(wide[start:stop], next(noise))


def round_with_noise(x: Tensor, noise: Tensor) -> Tensor:
    """Return float32 x in bfloat16, rounded by noise, int32 below 2^16.

    A bfloat16 is the upper half of a float32: noise added to the lower half carries over with the right probability.
    """
    bits = (x.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(x.isnan(), x, bits).to(torch.bfloat16)


def chunk_noise(seed: Tensor, first: int, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield the noise of all chunks of all tensors in order.

    Noise of small tensors is computed together, up to the elements of a chunk: one call each would take as long.
    """
    pieces: list[Piece] = []
    held, most = 0, _chunk_on(seed.device)
    for number, size in enumerate(sizes, first):
        for start, stop in chunks(size, seed.device):
            padded = -(-(stop - start) // TILE) * TILE
            if pieces and held + padded > most:
                yield from halves(seed.view(()), pieces)
                pieces, held = [], 0
            pieces.append((number, start, stop - start))
            held += padded
    if pieces:
        yield from halves(seed.view(()), pieces)


def chunks(count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield where chunks of `count` elements start and stop."""
    size = _chunk_on(device)
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _chunk_on(device: torch.device) -> int:
    return CHUNK if device.type == "cpu" else 32 * CHUNK
