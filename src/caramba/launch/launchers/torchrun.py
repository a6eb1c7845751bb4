"""`launcher=torchrun`: the ranks of a run on this machine, their logs, and the first failure among them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.console import print_stderr
from caramba.errors import ConfigError
from caramba.launch.launchers.process import last_lines, visible_gpus
from caramba.launch.preflight import threads_each
from caramba.runs import MANIFEST
from caramba.runs.exit_codes import (
    INTERRUPTED,
    MISTAKE,
    REDUCED,
    REDUCED_REASON,
    STOPPED,
    TERMINATED,
    DeferredSignals,
)
from caramba.runs.files import marks_of
from caramba.runs.ranks import is_rank

LOGS, FAILURE = "logs", "failure.json"
_POLL_S, _SIGNAL_POLL_S = 0.2, 0.1


def check_torchrun(manifest: Manifest, *, is_plan: bool = False) -> None:
    """Check that the ranks can be started here; a plan does not count GPUs.

    Raises:
        ConfigError: PyTorch without torch.distributed, more ranks than GPUs, or ranks that nothing joins.
    """
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or ()
    if not any((Path(folder) / "distributed" / "run.py").is_file() for folder in folders):
        raise ConfigError(
            "launcher=torchrun: this PyTorch has no torch.distributed.run; install one that has, or launcher=inline"
        )
    ranks = ranks_per_node(manifest)
    # Ranks that have been started may be on many nodes: each looks for its GPU as it joins.
    devices = [] if is_plan or is_rank() else _devices(manifest)
    if devices and ranks > len(devices):
        raise ConfigError(
            f"launcher=torchrun: {ranks} ranks and {len(devices)} GPUs ({', '.join(devices)}); set "
            f"launcher.nproc_per_node={len(devices)} with parallel sizes to match, or device=cpu"
        )


def ranks_per_node(manifest: Manifest) -> int:
    """Return how many ranks a node has: `nproc_per_node`, else what the sizes of `parallel` make.

    Raises:
        ConfigError: the sizes do not divide among the nodes, contradict `nproc_per_node`, or more ranks than one are
            asked for without a strategy that joins them; or `dp=auto` in a SLURM job whose GPUs are not given.
    """
    launcher, parallel = manifest.launcher, manifest.parallel
    nodes, asked = launcher.nodes or 1, launcher.nproc_per_node
    if parallel.strategy == "single":
        if (asked or 1) * nodes > 1:
            raise ConfigError(
                f"launcher: {asked or 1} ranks on {nodes} node(s), and parallel.strategy=single is one process; add "
                "parallel=ddp, or leave out launcher.nodes and launcher.nproc_per_node"
            )
        return 1
    total = parallel.ranks
    if total is None:  # as many as there are
        known = manifest.open_ranks_per_node
        if known is not None:
            return known
        if launcher.is_slurm:  # this machine, which submits the job, may have other GPUs than its nodes
            raise ConfigError(
                f"launcher={launcher.type}: parallel.dp=auto is a rank for each GPU of a node, tp={parallel.tp} at "
                f"a time, and cluster.gpus={manifest.cluster.gpus} with device={manifest.device} does not say how "
                "many; set launcher.nproc_per_node, parallel.dp, or cluster.gpus to a number of them"
            )
        return max(1, len(_devices(manifest)) // parallel.tp) * parallel.tp
    if total % nodes or (asked is not None and asked * nodes != total):
        raise ConfigError(
            f"launcher: parallel.{parallel.sizes} are {total} ranks, and launcher.nodes={nodes} x "
            f"launcher.nproc_per_node={asked or 'auto'} do not make them; change one so that both are the same number"
        )
    return total // nodes


def _devices(manifest: Manifest) -> list[str]:
    if manifest.device not in ("auto", "cuda"):
        return []
    return [str(item) for item in manifest.launcher.devices or ()] or visible_gpus()


def run_torchrun(run_dir: Path, manifest: Manifest, flags: Sequence[str]) -> int:
    """Run the ranks of a run, restart them if that can help, and return the exit status.

    It is the status of the first rank that failed, whose last lines are printed. Bad input (2) is never restarted. Out
    of memory with a smaller batch in plan.json restarts once for each phase, independent of `max_restarts`. A signal
    to this process ends the restarts.

    Raises:
        KeyboardInterrupt: a signal came when the ranks had finished.
    """
    with SignalForwarder() as forwarder:
        status = _attempts(run_dir, manifest, flags, forwarder)
    if status == 0 and forwarder.heard:  # too late for the ranks, and in time for what would follow, in a sweep
        raise KeyboardInterrupt(signal.Signals(forwarder.heard[0]).name)
    return status


def _attempts(run_dir: Path, manifest: Manifest, flags: Sequence[str], forwarder: SignalForwarder) -> int:
    most = manifest.launcher.max_restarts or 0
    attempt = 0
    started_again: set[str] = set()  # the phases for whose smaller batch they were
    while True:
        before = _reduced_batches(run_dir)
        status = _attempt(run_dir, manifest, _log_folder(run_dir), flags, forwarder)
        if forwarder.heard and status == REDUCED:
            return forwarder.status
        if forwarder.heard or status in (0, MISTAKE, *STOPPED):
            return status
        if status == REDUCED:
            smaller = _reduced_batches(run_dir)
            # If plan.json does not name the phase, restart once for all phases, so that this loop ends.
            phases = {name for name, size in smaller.items() if size != before.get(name)} or {""}
            if phases & started_again:
                of = f"{', '.join(sorted(phases))}: " if phases != {""} else ""
                print_stderr(f"{of}memory ran out again, with the smaller batch: not started again")
                return 1
            started_again |= phases
            print_stderr("starting all ranks again with the smaller batch")
        elif attempt < most:
            attempt += 1
            print_stderr(f"starting all ranks again from the last saved state (restart {attempt} of {most})")
        else:
            return status


def _reduced_batches(run_dir: Path) -> dict[str, int]:
    """Return the batch of every phase that plan.json has a smaller one of, since memory ran out in it."""
    try:
        plans = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
        found = {name: made["decisions"].get("batch_size") for name, made in plans.items()}
        return {
            name: made["value"]
            for name, made in found.items()
            if made is not None and made["reason"].startswith(REDUCED_REASON)
        }
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # nothing is planned yet; or it is damaged, which the ranks say as they set it aside


def _log_folder(run_dir: Path) -> Path:
    """Make the next RUN/logs/torchrun-N: the logs of an attempt are never written over."""
    parent = run_dir / LOGS
    parent.mkdir(exist_ok=True)
    number = 0
    while True:
        folder = parent / f"torchrun-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _attempt(run_dir: Path, manifest: Manifest, folder: Path, flags: Sequence[str], forwarder: SignalForwarder) -> int:
    ranks = ranks_per_node(manifest)
    threads = threads_each(ranks, manifest.launcher, os.environ)
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if manifest.launcher.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(_devices(manifest))
    words = [str(run_dir / MANIFEST), str(folder), str(ranks), *flags]

    def start() -> subprocess.Popen[bytes]:
        with open(folder / "agent.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "caramba.launch.launchers.elastic", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
                pass_fds=marks_of(run_dir),
            )

    with _shown(folder):
        status = forwarder.run(start)
    return _ending(folder, status, forwarder)


@contextlib.contextmanager
def _shown(folder: Path) -> Iterator[None]:
    """Within, what rank 0 writes to its logs is also written here."""
    done = threading.Event()
    streams = ((folder / "rank-0.out", sys.stdout), (folder / "rank-0.err", sys.stderr))

    def follow() -> None:
        places = [0, 0]
        is_last = False
        while not is_last:
            is_last = done.wait(_POLL_S)
            for number, (file, stream) in enumerate(streams):
                if file.exists():
                    with open(file, "rb") as log:
                        log.seek(places[number])
                        text = log.read()
                    places[number] += len(text)
                    if text:
                        stream.write(text.decode("utf-8", "replace"))
                        stream.flush()

    thread = threading.Thread(target=follow, name="rank-0-output")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _ending(folder: Path, status: int, forwarder: SignalForwarder) -> int:
    """Say how the ranks ended when one failed, and return the run's exit status."""
    if status == 0:
        return 0
    if status in (128 + signal.SIGINT, -signal.SIGINT):
        return INTERRUPTED
    if status in (128 + signal.SIGTERM, -signal.SIGTERM):
        return forwarder.status or TERMINATED
    try:
        failure = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        tail = last_lines(folder / "agent.log")
        print_stderr(f"failed: the agent that runs the ranks ended with status {status}:\n{tail}\nlogs: {folder}")
        return 1
    rank, code = failure["rank"], failure["exit_status"]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    is_alone = not (folder / "rank-1.err").exists()
    print_stderr(f"rank {rank} {how}" if is_alone else f"rank {rank} failed first: it {how}; the others were stopped")
    if rank != 0 and (tail := last_lines(folder / f"rank-{rank}.err")):  # the output of rank 0 is shown live
        print_stderr(tail)
    if code != MISTAKE:  # of a mistake nothing more is in them
        print_stderr(f"logs of all ranks: {folder}")
    return code if code > 0 else 1


class SignalForwarder(DeferredSignals):
    """Forward SIGINT and termination to the elastic agent, so that its ranks can save.

    `run` forwards, not the handler: a signal that comes while the agent starts would be lost, and the agent runs in a
    session of its own.
    """

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> int:
        """Start an agent and return its exit status, negative where a signal ended it.

        Ctrl-C is forwarded as SIGINT and everything else as SIGTERM. The ranks save at the end of their step, without a
        time limit. A second Ctrl-C kills the agent, and the kernel kills its ranks with it (`end_with_agent`).
        """
        agent = start()
        n_forwarded, is_interrupted = 0, False
        while True:
            for number in self.heard[n_forwarded:]:
                n_forwarded += 1
                if number != signal.SIGINT:
                    agent.terminate()
                elif not is_interrupted:
                    agent.send_signal(signal.SIGINT)
                    is_interrupted = True
                else:
                    agent.kill()
                    agent.wait()
                    return -signal.SIGINT
            try:
                return agent.wait(_SIGNAL_POLL_S)
            except subprocess.TimeoutExpired:
                continue
