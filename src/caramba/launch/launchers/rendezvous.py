"""`torchrun … -m caramba.launch …`: rank 0 composes, once; the others wait for the run that it names."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caramba.config.manifest import Manifest
from caramba.console import print_stderr
from caramba.errors import CarambaError, ConfigError
from caramba.runs.ranks import AGENT_STORE, rank

WAIT_S = 600.0
_KEY = "caramba/run_dir"


def refuse_launcher(manifest: Manifest) -> None:
    """Raise when a launch that is itself a rank asks for a launcher that starts others."""
    if manifest.launcher.type != "inline":
        raise ConfigError(
            f"launcher={manifest.launcher.type}: torchrun has started these ranks; leave out launcher=, or start "
            f"without torchrun: caramba launch launcher={manifest.launcher.type} …"
        )


def shared_run_dir(make: Callable[[], Path]) -> Path:
    """Return the run directory of all ranks: the one that rank 0 makes, through the store that torchrun keeps.

    After an elastic restart it is the one made before: the store outlives the ranks.

    Raises:
        CarambaError: there is no store, or rank 0 names no run in time.
    """
    store = _store()
    if rank() == 0 and not store.check([_KEY]):
        run_dir = make()
        store.set(_KEY, str(run_dir.absolute()))
        return run_dir
    if rank() != 0:
        print_stderr(f"rank {rank()}: waiting for the run that rank 0 composes")
    try:
        found = Path(store.get(_KEY).decode())
    except RuntimeError as error:
        raise CarambaError(
            f"rank {rank()}: rank 0 has named no run within {WAIT_S:.0f} s; see the log of rank 0 "
            f"({str(error).splitlines()[0]})"
        ) from None
    if not (found / "manifest.json").is_file():
        raise CarambaError(
            f"rank {rank()}: {found} is not here; ranks on several machines need a folder that all of them see"
        )
    return found


def _store() -> Any:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise ConfigError(
            "RANK and WORLD_SIZE are set and MASTER_ADDR or MASTER_PORT is not, so the ranks cannot find each other; "
            "start them with torchrun, or unset RANK and WORLD_SIZE"
        )
    if os.environ.get(AGENT_STORE) != "True":
        raise ConfigError(
            "these ranks were not started by torchrun, whose agent keeps what rank 0 composes; use torchrun, or launch "
            "once and start the ranks on RUN/manifest.json: python -m caramba.worker RUN/manifest.json"
        )
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(address, int(port), is_master=False, timeout=datetime.timedelta(seconds=WAIT_S))
