"""What Python's garbage collector looks at while engines run.

A full collection looks at all that the process has made, some 400,000 objects with torch loaded, for 0.2 to 0.4 s in
which nobody gets a token, and comes as often as requests queue up. What is there before the first engine's thread is
left alone until the last one has ended.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_engines = 0
_was_empty = False


def leave_alone() -> None:
    """Collect, and leave what is left alone until as many `look_again` as there were of these."""
    global _engines, _was_empty
    with _lock:
        if _engines == 0:
            _was_empty = gc.get_freeze_count() == 0
        _engines += 1
        gc.collect()
        gc.freeze()


def look_again() -> None:
    """Take back one `leave_alone`. After the last, the collector looks at everything again, unless something had been
    left alone before the first."""
    global _engines
    with _lock:
        _engines -= 1
        if _engines == 0 and _was_empty:
            gc.unfreeze()
