"""What the CUDA kernels of quantised streams have in common: blocks, a warp's tile, the most of shared memory."""

BLOCKS = {"q8_0": (32, 32, 2), "q4_0": (32, 16, 2), "nf4": (64, 32, 4)}
"""Elements of a block, bytes of its codes and of its scale."""
ZEROS = "zeros"
"""The format of the second key part if keys are undivided: bfloat16 zeros, which no kernel reads."""
TOKENS = 32
"""Tokens of a warp's tile."""
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block of Hopper may have."""
TAKEN = 1024
"""Bytes of shared memory that a block takes beyond what it asks for."""
