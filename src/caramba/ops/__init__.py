"""Ops under `torch.ops.caramba`, one file each: schema, reference, fake, gradient and a public function of its name."""

from caramba.ops.backend import METAL_AVAILABLE as METAL_AVAILABLE
from caramba.ops.backend import TRITON_AVAILABLE as TRITON_AVAILABLE
from caramba.ops.backend import fused_decode_available as fused_decode_available
from caramba.ops.backend import get_backend_info as get_backend_info
from caramba.ops.backend import has_kernel as has_kernel
from caramba.ops.backend import implementation as implementation
from caramba.ops.backend import is_fused as is_fused
