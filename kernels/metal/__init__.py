"""Metal shaders, one .metal file per op, launched through torch.mps.compile_shader. Imported only on MPS."""

LAUNCHERS: dict[str, str] = {}
"""Op -> "module:function" of its launcher; an op that is not here runs its reference."""
