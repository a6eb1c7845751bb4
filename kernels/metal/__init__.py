"""Metal kernels, launched through torch.mps.compile_shader; none yet."""
