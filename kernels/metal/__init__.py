"""Metal shaders, one .metal file per op, launched through torch.mps.compile_shader. Imported only on MPS."""
