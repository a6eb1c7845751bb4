"""Triton kernels and their plain launchers, one file per op. Imported only by `caramba.kernels.load` on CUDA."""

LAUNCHERS: dict[str, str] = {
    "cross_entropy_rows": "caramba.kernels.triton.cross_entropy_rows:cross_entropy_rows",
    "dba_decode": "caramba.kernels.triton.dba_decode:dba_decode",
}
"""Op -> "module:function" of its launcher; an op that is not here runs its reference."""
