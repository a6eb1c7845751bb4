"""Triton kernels and their plain launchers, one file per op. Imported only by `caramba.kernels.load` on CUDA."""

LAUNCHERS: dict[str, str] = {
    "dba_decode": "caramba.kernels.triton.dba_decode:dba_decode",
    "dequantize": "caramba.kernels.triton.dequantize:dequantize",
    "quantize": "caramba.kernels.triton.quantize:quantize",
}
"""Op -> "module:function" of its launcher; an op that is not here runs its reference."""
