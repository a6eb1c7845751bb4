"""How a command that needs torch starts: its imports make over a million objects, of which none is garbage."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def imports_without_gc() -> Iterator[None]:
    """Import in this block what brings torch: nothing looks for garbage meanwhile, and never among what it loaded.

    Where torch is loaded already the block changes nothing: by then there may be garbage, which is to be collected.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
