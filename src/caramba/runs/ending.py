"""How a command ends: errors become one readable text and an exit status, tracebacks only on request."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from caramba.errors import CarambaError

INTERRUPTED = 130


def end(command: Callable[[], int], *, is_debug: bool = False) -> int:
    """Run `command` and return its exit status.

    A user's mistake is 2, a failure 1, Ctrl-C 130. `is_debug` adds the traceback.
    """
    try:
        return command()
    except CarambaError as error:
        if is_debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if is_debug:
            traceback.print_exc()
        hint = "" if is_debug else " (--debug shows the traceback)"
        print(f"failed: {type(error).__name__}: {error}{hint}", file=sys.stderr)
        return 1
