"""Opens streaming data sets through the `datasets` library: a hub repository at one commit, or local files."""

# pyright: reportMissingImports=false
# The library is an optional extra, and its own annotations are loose.

from __future__ import annotations

from pathlib import Path
from typing import Any

from caramba.data.sources import HubSource
from caramba.errors import DataError
from caramba.runs.deadline import TimedOut, run_with_timeout

FINEWEB = "HuggingFaceFW/fineweb"
FINEWEB_SAMPLE = "sample-10BT"
_WAIT_SECONDS = 8
_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".gz": "json", ".zst": "json"}
_WAYS_ON = (
    "check the network or a proxy; or fetch its parquet files elsewhere, copy them here and give them with --from PATH;"
    " or use `caramba prepare text PATH` or `caramba prepare stdlib`, which need no network"
)


def open_hub(repository: str, config: str | None, revision: str | None, field: str = "text") -> HubSource:
    """Open a hub data set's train split as a stream, pinned to the commit that `revision` is now.

    Raises:
        DataError: `datasets` is not installed, or the hub does not answer in eight seconds or refuses.
    """
    datasets = _datasets()
    commit = _commit(repository, revision)
    try:
        stream = datasets.load_dataset(
            repository, name=config, split="train", streaming=True, revision=commit
        )
    except Exception as error:  # every layer below it raises its own kind
        raise DataError(
            f"{repository} at {commit}: cannot be opened ({type(error).__name__}: {error}); {_WAYS_ON}"
        ) from error
    identity = {"corpus": repository, "config": config, "revision": commit}
    return HubSource(stream, identity, field)


def open_local(paths: list[Path], field: str = "text") -> HubSource:
    """Open parquet or JSON-lines files, or folders of them, as a stream; the same code as a hub data set's.

    Raises:
        DataError: `datasets` is not installed, or there are no such files, or they are of two formats.
    """
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [file for file in files if file.suffix in _BUILDERS and file.is_file()]
    builders = {_BUILDERS[file.suffix] for file in files}
    if len(builders) != 1:
        raise DataError(
            f"{', '.join(map(str, paths))}: {len(files)} data files of {sorted(builders) or 'no known format'};"
            " expected .parquet files, or .jsonl files (also .jsonl.gz, .jsonl.zst), not both"
        )
    stream = _datasets().load_dataset(
        builders.pop(), data_files=[str(file) for file in files], split="train", streaming=True
    )
    listing = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return HubSource(stream, {"corpus": "local data set", "files": listing}, field)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "caramba prepare fineweb: the `datasets` library is not installed; pip install 'caramba[data]', or use"
            " `caramba prepare text PATH`, which needs nothing more"
        ) from error
    return datasets


def _commit(repository: str, revision: str | None) -> str:
    """Ask the hub for the commit of a revision; in a thread, since a name server may take minutes to say no."""
    from huggingface_hub import HfApi

    cause: Exception | None = None
    said = f"no answer in {_WAIT_SECONDS} s"
    try:
        info = run_with_timeout(
            _WAIT_SECONDS, lambda: HfApi().dataset_info(repository, revision=revision, timeout=_WAIT_SECONDS)
        )
        if info.sha:
            return str(info.sha)
    except Exception as error:
        if not isinstance(error, TimedOut):
            cause, said = error, f"{type(error).__name__}: {error}"
    raise DataError(
        f"{repository}: the hub cannot be reached ({' '.join(said.split())[:200]}); {_WAYS_ON}"
    ) from cause
