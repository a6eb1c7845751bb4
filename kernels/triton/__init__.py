"""Triton kernels and their plain launchers, one file per op. Imported only by `caramba.kernels.load` on CUDA."""

LAUNCHERS: dict[str, str] = {
    "linear_cross_entropy": "caramba.kernels.triton.linear_cross_entropy:linear_cross_entropy",
}
"""Op -> "module:function" of its launcher; an op that is not here runs its reference."""
