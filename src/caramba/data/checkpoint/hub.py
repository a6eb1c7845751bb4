"""Models of the Hugging Face hub: from this machine's cache where they are there, else by the hub's own client."""

import os
import re
from pathlib import Path
from typing import Any

from caramba.data.checkpoint.folder import CONFIG, weight_files
from caramba.errors import CheckpointError
from caramba.runs.deadline import TimedOut, run_with_timeout

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
ANSWER_SECONDS = 8.0
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def hub_cache() -> Path:
    """Return the folder where the hub's client keeps downloads."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"


def cached_folder(hub_id: str, *, needs_weights: bool = True) -> Path | None:
    """Return the local snapshot of a hub id, `main` first, then the newest, or None; never uses the network.

    A snapshot counts when it holds config.json and, with `needs_weights`, every file of its weights.
    """
    home = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    found = sorted((home / "snapshots").glob("*"), key=lambda folder: -folder.stat().st_mtime)
    main = home / "refs" / "main"
    commit = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    for folder in sorted(found, key=lambda folder: folder.name != commit):
        if (folder / CONFIG).is_file() and (not needs_weights or _has_weights(folder)):
            return folder
    return None


def hub_folder(hub_id: str, *, needs_weights: bool = True) -> Path:
    """Return the local snapshot of a hub id, downloaded when it is not complete in the cache.

    Args:
        needs_weights: false downloads config.json alone.

    Raises:
        CheckpointError: the hub is out of reach, does not answer within 8 seconds, or refuses; the text is the reason.
    """
    cached = cached_folder(hub_id, needs_weights=needs_weights)
    if cached is not None:
        return cached
    if any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in OFFLINE):
        raise CheckpointError("the hub is switched off here (HF_HUB_OFFLINE)")
    _ask(hub_id)
    return _download(hub_id, PATTERNS if needs_weights else (CONFIG,))


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except CheckpointError:
        return False


def _client() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError("the hub's client is not installed (pip install huggingface_hub)") from None
    return huggingface_hub


def _ask(hub_id: str) -> None:
    """Find out quickly whether the hub answers: the client itself waits and retries for minutes."""
    client = _client()
    try:
        run_with_timeout(ANSWER_SECONDS, lambda: client.HfApi().model_info(hub_id, timeout=ANSWER_SECONDS))
    except TimedOut:
        raise CheckpointError(f"the hub did not answer within {ANSWER_SECONDS:.0f} seconds") from None
    except Exception as error:
        raise _refused(error) from error


def _download(hub_id: str, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(_client().snapshot_download(hub_id, allow_patterns=list(patterns), cache_dir=str(hub_cache())))
    except (OSError, ValueError, RuntimeError) as error:
        raise _refused(error) from error


def _refused(error: BaseException) -> CheckpointError:
    kinds = {
        "GatedRepoError": "it is gated, and this account has not been given access",
        "RepositoryNotFoundError": "the hub has no such model, or it is private",
        "ConnectError": "the hub is out of reach",
        "ConnectTimeout": "the hub is out of reach",
        "ConnectionError": "the hub is out of reach",
        "OfflineModeIsEnabled": "the hub is switched off here (HF_HUB_OFFLINE)",
    }
    names = [kind.__name__ for kind in type(error).__mro__]
    reason = next((kinds[name] for name in names if name in kinds), "the hub refused")
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return CheckpointError(f"{reason} ({names[0]}: {first[:200]})" if first else f"{reason} ({names[0]})")
