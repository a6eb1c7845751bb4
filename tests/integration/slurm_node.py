"""A SLURM of one node on this machine: real munged, slurmctld and slurmd in a folder of their own, ended after use.

`python tests/integration/slurm_node.py FOLDER` starts one and waits for Ctrl-C, to try things by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo", "scancel")
START_S = 30.0
SLURM_CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
ReturnToService=2
KillWait=10
JobRequeue=1
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return what is not installed, or not allowed, of what a node needs."""
    lacking = [name for name in PROGRAMS if _program(name) is None]
    return lacking or ([] if os.getuid() == 0 else ["the right to start daemons (root)"])


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")  # where daemons are


class SlurmNode:
    """Starts the daemons on entry and ends them, with every job, on exit. `variables` makes commands use this SLURM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmNode:
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)  # munged trusts no folder that others may write to
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        ctld_port, d_port = _free_ports(2)
        text = SLURM_CONF.format(folder=self.folder, host=host, ctld_port=ctld_port, d_port=d_port)
        (self.folder / "slurm.conf").write_text(text)
        files = {name: str(self.folder / f"munge.{name}") for name in ("socket", "pid", "log", "seed", "key")}
        try:
            self._start(
                "munged",
                "--foreground",
                "--force",
                *(f"--{option}={files[name]}" for option, name in _MUNGE_FILES.items()),
            )
            self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
            self._start("slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", host)
            self._wait(lambda: self.run("sinfo", "-h", "-o", "%T").strip() in ("idle", "mixed"), "slurmd")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) == 3:
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(3)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self._left_behind():  # keepers of steps that were to report to a daemon that is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left_behind(self) -> list[int]:
        """Return the processes that still write this node's log."""
        log, found = str(self.folder / "slurmd.log"), []
        for files in Path("/proc").glob("[0-9]*/fd"):
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if any(os.readlink(file) == log for file in files.iterdir()):
                    found.append(int(files.parent.name))
        return found

    def run(self, *command: str) -> str:
        """Run a SLURM command and return what it prints."""
        done = subprocess.run(command, env={**os.environ, **self.variables}, capture_output=True, text=True, timeout=30)
        return done.stdout

    def _start(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [_program(command[0]) or command[0], *command[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.variables},
                    start_new_session=True,
                )
            )

    def _wait(self, is_up, name: str) -> None:
        limit = time.monotonic() + START_S
        while not is_up():
            if time.monotonic() > limit or any(daemon.poll() is not None for daemon in self._daemons):
                logs = [file.read_text(errors="replace")[-1500:] for file in self.folder.glob("*.out")]
                raise RuntimeError(f"{name} did not come up:\n" + "\n".join(logs))
            time.sleep(0.1)


_MUNGE_FILES = {
    "socket": "socket",
    "key-file": "key",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


if __name__ == "__main__":
    if lacking := missing():
        sys.exit(f"missing: {', '.join(lacking)}; apt-get install slurm-wlm munge")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with SlurmNode(Path(sys.argv[1]).absolute()) as node:
        print(f"export SLURM_CONF={node.variables['SLURM_CONF']}", flush=True)
        while True:
            signal.pause()
