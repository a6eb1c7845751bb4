"""Metal kernels, launched through torch.mps.compile_shader. Not run on Apple hardware yet: tests emulate them."""
