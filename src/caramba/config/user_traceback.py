"""The message of an error in user code, with the line of user code that raised it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def user_traceback(error: BaseException) -> str:
    """Return `ZeroDivisionError: division by zero (my_pkg/layers.py:7)`, the innermost line that is the person's own.

    Of an error without such a line, the innermost one outside of caramba and of the import machinery.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({shown(error.filename)}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", _OURS))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    place = next(reversed(own or frames), None)
    return text if place is None else f"{text} ({shown(place.filename)}:{place.lineno})"


def shown(file: str | Path) -> str:
    """Return a file's path as a message names it: relative to the current folder if it is below it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
