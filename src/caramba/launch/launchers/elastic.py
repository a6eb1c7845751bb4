"""PyTorch's elastic agent, torchrun's own, over the ranks of one frozen manifest; a process that loads torch.

`python -m caramba.launch.launchers.elastic RUN/manifest.json LOGS RANKS [flags]`. Each rank's output is in
LOGS/rank-N.out and .err. When one fails, LOGS/failure.json states which failed first and its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from caramba.runs.exit_codes import TERMINATED
from caramba.runs.files import write_json
from caramba.runs.ranks import AGENT

FAILURE = "failure.json"
SAVE_S = 600
SIGNAL_CREDIT_S = 2.0
"""The agent polls: ranks that wait for a killed rank may fail before the agent notices that one."""
_STOP_STATUSES = (-signal.SIGTERM, TERMINATED)


class RankLogs(LogsSpecs):
    """Output and error files of every rank, in one folder."""

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        def files(suffix: str) -> dict[int, str]:
            return {local: f"{self.root_log_dir}/rank-{env['RANK']}.{suffix}" for local, env in envs.items()}

        return LogsDest(stdouts=files("out"), stderrs=files("err"), error_files=files("error.json"))


def first_failure(failures: Mapping[int, Any]) -> dict[str, Any]:
    """Return the failure that the others followed from, of {rank: its exit code and error file}.

    It is the one with the earliest time. The agent sends SIGTERM to the others, and SIGKILL half a minute later to
    those that hang, so these come last. A rank that a signal killed writes no error file: its time is when the agent
    noticed it, minus SIGNAL_CREDIT_S.
    """

    def order(item: tuple[int, Any]) -> tuple[bool, float]:
        code = item[1].exitcode
        return code in _STOP_STATUSES, _failure_time(item[1]) - (SIGNAL_CREDIT_S if code < 0 else 0.0)

    rank, failure = min(failures.items(), key=order)
    return {"rank": rank, "exit_status": int(failure.exitcode), "ranks_failed": sorted(failures)}


def _failure_time(failure: Any) -> float:
    try:
        return float(json.loads(Path(failure.error_file).read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError):  # it wrote no error file
        return float(failure.timestamp)


def _wait_for_saves() -> None:
    """Give ranks that a signal stops SAVE_S to end their step and save; PyTorch kills them after 30 s."""
    shutdown = LocalElasticAgent._shutdown

    def patient(self: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        shutdown(self, death_sig, SAVE_S if isinstance(sys.exception(), SignalException) else timeout)

    LocalElasticAgent._shutdown = patient


def main(argv: Iterable[str]) -> int:
    """Run the ranks and return 0 on success, 1 if one failed, 128 + N if signal N came."""
    manifest, folder, ranks, *flags = argv
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id=Path(manifest).parent.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # the caller decides on restarts: none after bad input or a stop signal
        logs_specs=RankLogs(folder),
    )
    os.environ[AGENT] = str(os.getpid())  # for the ranks, which get our variables
    _wait_for_saves()
    try:
        elastic_launch(config, sys.executable)("-m", "caramba.worker", manifest, *flags)
    except ChildFailedError as error:
        write_json(Path(folder) / FAILURE, first_failure(error.failures))
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
