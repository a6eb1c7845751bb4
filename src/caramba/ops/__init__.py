"""Op contracts under `torch.ops.caramba`: schema, reference, fake and a public function each, one file per op."""

from caramba.ops.backend import (
    METAL_AVAILABLE,
    TRITON_AVAILABLE,
    fused_decode_available,
    get_backend_info,
    implementation,
)
from caramba.ops.dba_decode import MAX_QUERIES, StoredStream, dba_decode
from caramba.ops.dequantize import dequantize
from caramba.ops.formats import STORED, StoredFormat, stored_format
from caramba.ops.hadamard import hadamard
from caramba.ops.quantize import quantize

__all__ = [
    "MAX_QUERIES",
    "METAL_AVAILABLE",
    "STORED",
    "TRITON_AVAILABLE",
    "StoredFormat",
    "StoredStream",
    "dba_decode",
    "dequantize",
    "fused_decode_available",
    "get_backend_info",
    "hadamard",
    "implementation",
    "quantize",
    "stored_format",
]
