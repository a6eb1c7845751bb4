"""Triton kernels and their plain launchers, one file per op. Imported only by `caramba.kernels.load` on CUDA."""
