"""Activations in the host's memory between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # smaller ones cost a copy each and hold nothing


@contextmanager
def activations_on_host(parameters: Iterable[Tensor], least_bytes: int = LEAST_BYTES) -> Iterator[None]:
    """Offload activations saved for backward to host memory, and copy them back on use.

    Host memory is pinned for a CUDA device. `parameters`, which stay on the device anyway, and tensors below
    `least_bytes` are not offloaded.

    Copies are queued in order with the computation, so nothing waits on the host's side and gradients are the same.
    """
    resident = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if tensor.nbytes < least_bytes or tensor.untyped_storage().data_ptr() in resident:
            return tensor
        # Strides stay as they are: compiled backwards rely on them.
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
