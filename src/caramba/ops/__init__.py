"""Ops under `torch.ops.caramba`, one file each: schema, reference, fake, gradient and a public function of its name."""

from caramba.ops.backend import (
    METAL_AVAILABLE,
    TRITON_AVAILABLE,
    fused_decode_available,
    get_backend_info,
    has_kernel,
    implementation,
    is_fused,
)

__all__ = [
    "METAL_AVAILABLE",
    "TRITON_AVAILABLE",
    "fused_decode_available",
    "get_backend_info",
    "has_kernel",
    "implementation",
    "is_fused",
]
