"""Which of a run's processes this one is, from torchrun's variables, into which SLURM's are translated."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping

from caramba.errors import CarambaError

FROM_SLURM = "CARAMBA_RANKS"
"""Set to `slurm` by our sbatch scripts: the tasks of a step are ranks."""
AGENT = "CARAMBA_AGENT"
"""The process id of our elastic agent, for the ranks that it starts."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set for the ranks of any elastic agent; `True` where the agent holds the store that they meet in."""
STOP_S = 60.0
_PR_SET_PDEATHSIG = 1
_SLURM_NAMES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
    "GROUP_RANK": "SLURM_NODEID",
    "TORCHELASTIC_RUN_ID": "SLURM_JOB_ID",
}


def is_rank(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher of ranks, such as torchrun, started this process."""
    is_numbered = "RANK" in variables and "WORLD_SIZE" in variables
    return is_numbered and (world_size(variables) > 1 or "TORCHELASTIC_RUN_ID" in variables)


def rank(variables: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank, 0 where none was given."""
    return int(variables.get("RANK") or "0")


def world_size(variables: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks, 1 where none was given."""
    return int(variables.get("WORLD_SIZE") or "1")


def adopt_slurm_ranks(variables: MutableMapping[str, str] = os.environ) -> None:
    """Give a task of our own SLURM step the variables that torchrun would give it.

    Later code then has one source of ranks, and Lightning, which looks for torchrun's first, does not handle SLURM's
    signals and requeueing.
    """
    if variables.get(FROM_SLURM) != "slurm" or is_rank(variables) or "SLURM_PROCID" not in variables:
        return
    for name, theirs in _SLURM_NAMES.items():
        variables[name] = variables.get(theirs, "1" if name == "LOCAL_WORLD_SIZE" else "0")


def end_with_agent(variables: Mapping[str, str] = os.environ) -> None:
    """Have the kernel end this rank when its elastic agent ends without stopping it.

    Our own agent is killed when its ranks have not stopped in time: then they are killed as well. A user's torchrun
    ends at once on signals that it does not handle, such as SIGUSR1: its ranks are asked to stop, which saves their
    state, and end within STOP_S. Linux only, and only under an agent: elsewhere it does nothing.

    Raises:
        CarambaError: the agent has ended already.
    """
    if sys.platform != "linux":
        return
    if ours := variables.get(AGENT):
        _end_with(int(ours), signal.SIGKILL, variables)
    elif AGENT_STORE in variables:
        agent = os.getppid()
        _end_with(agent, signal.SIGTERM, variables)
        threading.Thread(target=_limit_stop, args=(agent,), name="agent", daemon=True).start()


def _end_with(agent: int, how: signal.Signals, variables: Mapping[str, str]) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != agent:  # it ended before prctl took effect
        raise CarambaError(
            f"rank {rank(variables)}: the agent that started it, process {agent}, has ended; resume with caramba resume"
        )


def _limit_stop(agent: int) -> None:
    """Once the agent has ended, have the kernel end this process too when it has not stopped in STOP_S.

    It may wait without end for a rank that has stopped elsewhere. The kernel's alarm needs no Python to run.
    """
    while os.getppid() == agent:
        time.sleep(0.5)
    signal.setitimer(signal.ITIMER_REAL, STOP_S)
