"""What a result depends on besides its manifest: packages, machine, driver, code; without names of people or hosts."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caramba import __version__
from caramba.errors import ConfigError
from caramba.runs.files import write_json

ENVIRONMENT, GIT_PATCH = "env.json", "git.patch"
GIT_PATCH_SWITCH = "CARAMBA_GIT_PATCH"
"""The environment variable that is set to `off` by who does not want uncommitted changes stored with runs."""
SHARING = "CARAMBA_SHARING_WORKERS"
"""The environment variable by which a pool tells its workers how many of them share a device and its memory."""
# What numbers depend on; a change of any other package is not worth a line.
PACKAGES = (
    *("torch", "lightning", "hydra-core", "omegaconf", "pydantic", "numpy", "safetensors", "tokenizers"),
    *("triton", "transformers", "lm-eval"),
)


def sharing_workers() -> int:
    """Return how many workers of a pool share this one's device, itself included."""
    return max(int(os.environ.get(SHARING, "1")), 1)


def rewrite_machine(run_dir: Path) -> None:
    """Make env.json say what this machine is: a run that was made on a login node is computed elsewhere."""
    file = run_dir / ENVIRONMENT
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    write_json(file, {**kept, **_machine()})


_FIELD = re.compile(r"^(Name|Version): *(.*)$", re.MULTILINE)


def environment() -> dict[str, Any]:
    """Return the facts of this process and machine that a result depends on, without names of people or hosts."""
    return {**_machine(), "git_commit": git_commit(), "git_is_clean": git_patch() in (None, b"")}


@functools.cache
def _machine() -> dict[str, Any]:
    """What stays the same while a process lives, read once: a sweep makes hundreds of runs."""
    return {
        "caramba": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "host_sha256": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "packages": list_installed_packages(),
        "variables": {
            name: os.environ[name]
            for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
            if name in os.environ
        },
    }


def list_installed_packages() -> dict[str, str]:
    """Return every installed distribution with its version, by name."""
    # `item.metadata` would parse the whole text, which is a tenth of what a tiny launch takes of the CPU.
    versions = {}
    for item in importlib.metadata.distributions():
        text = item.read_text("METADATA") or item.read_text("PKG-INFO") or item.read_text("") or ""
        fields = dict(_FIELD.findall(text.partition("\n\n")[0]))
        if len(fields) == 2:
            versions[fields["Name"]] = fields["Version"]
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment_changes(run_dir: Path) -> Iterator[str]:
    """Yield what differs here from where a run was made: packages that numbers depend on, devices and code."""
    try:
        old = json.loads((run_dir / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        yield f"unknown, since {run_dir / ENVIRONMENT} is not there to be read"
        return
    new = environment()
    for name in ("caramba", "python", "machine", "cpu", "git_commit"):
        if old.get(name) != new[name]:
            yield f"{name} {old.get(name)} -> {new[name]}"
    packages: dict[str, str] = old.get("packages", {})
    for name in PACKAGES:
        if packages.get(name) != new["packages"].get(name):
            yield f"{name} {packages.get(name)} -> {new['packages'].get(name)}"
    then, now = ([f"{gpu['name']}, driver {gpu['driver']}" for gpu in item.get("gpus") or ()] for item in (old, new))
    if then != now:
        yield f"GPUs {then or 'none'} -> {now or 'none'}"
    patch = run_dir / GIT_PATCH
    if not patch.is_file() and old.get("git_is_clean") is False:
        yield f"uncommitted changes of the working folder, perhaps: they were not stored ({GIT_PATCH_SWITCH}=off)"
    elif (patch.read_bytes() if patch.is_file() else b"") != (git_patch() or b""):
        yield f"uncommitted changes of the working folder (then: {patch if patch.is_file() else 'none'})"


def git_commit() -> str | None:
    """Return the commit of the repository that the current folder is in, or None."""
    text = _git("rev-parse", "HEAD")
    return text.decode().strip() if text else None


def git_patch() -> bytes | None:
    """Return the changes to tracked files since that commit, or None."""
    return _git("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")


def stores_git_patch() -> bool:
    """Return whether runs store the uncommitted changes of the repository.

    Raises:
        ConfigError: the variable has a value that means neither.
    """
    value = os.environ.get(GIT_PATCH_SWITCH, "on").lower()
    if value not in ("on", "1", "true", "off", "0", "false"):
        raise ConfigError(f"{GIT_PATCH_SWITCH}={value}: expected on or off")
    return value in ("on", "1", "true")


def _git(*arguments: str) -> bytes | None:
    # A repository too large to wait for is as good as none.
    return output_of(["git", *arguments])


def output_of(command: list[str]) -> bytes | None:
    """Return what a program prints; None where it fails or is not on this machine."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _gpus() -> list[dict[str, str]]:
    """Return name, driver and memory of every NVIDIA GPU, from the driver's own tool: torch is not loaded here."""
    fields = ("name", "driver_version", "memory.total")
    text = output_of(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in (text or b"").decode().splitlines() if line.strip()]
    return [dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows if len(row) == len(fields)]
