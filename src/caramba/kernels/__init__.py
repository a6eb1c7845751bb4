"""Attaches the launchers of caramba.kernels.triton and caramba.kernels.metal to the ops."""
