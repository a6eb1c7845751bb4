"""What a paper may state: the numbers, settings, figures and tables of one finished run, each by its name."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.artifacts.key import MODELLESS, parse_key
from caramba.artifacts.latex import escape, typeset
from caramba.artifacts.tables import number
from caramba.artifacts.write import REPORT_FILE, TABLES_FILE
from caramba.config.manifest import Manifest
from caramba.config.source import is_mapping, is_sequence, read_object
from caramba.errors import CarambaError, ConfigError, need_name
from caramba.result import Metric
from caramba.runs.files import sha256_of
from caramba.runs.manifest import read_manifest

OPERATIONS, DIRECTIONS = ("ratio", "difference", "percent_change"), ("less", "more", "equal")
_TABLE = re.compile(r"\\begin\{table\}.*?\\label\{tab:caramba-([a-z0-9_-]+)\}.*?\\end\{table\}", re.DOTALL)
# Keys of a manifest that do not describe the experiment itself.
_UNTOLD = {"groups", "launcher", "cluster", "logger", "debug", "paper", "review", "research", "plugins", "notes"}


@dataclass(frozen=True)
class Result(Metric):
    """One number of report.json. `is_proxy` marks that it rests on a teacher that was trained here in place of a
    published one."""

    is_proxy: bool = False

    @property
    def error_of_mean(self) -> float:
        """The standard error of the value, zero where it has no dispersion."""
        return self.standard_error or (self.std or 0.0) / math.sqrt(self.n or 1)

    @property
    def value_tex(self) -> str:
        """The value alone, as the tables write it."""
        return typeset(number(self.value))

    @property
    def tex(self) -> str:
        """The value with its dispersion and unit."""
        spread = "" if self.spread is None else rf"\,$\pm$\,{typeset(number(self.spread))}"
        return f"{self.value_tex}{spread}{unit_tex(self.unit)}"


@dataclass(frozen=True)
class Evidence:
    """All of it. `settings` are leaves of the manifest and counts of the phases, as TeX, by their dotted path."""

    name: str
    run_id: str
    report_sha256: str
    manifest_sha256: str
    proxy: str | None
    results: Mapping[str, Result]
    settings: Mapping[str, str]
    figures: Mapping[str, tuple[Path, str]]
    """Files and their hashes in report.json."""
    tables: Mapping[str, str]
    files: tuple[str, ...]
    failures: tuple[str, ...]
    omitted: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Words of the manifest, which may hold digits: names of models, data and layouts."""
    appendix: str = ""
    """TeX behind the sections, written by code."""

    def result(self, key: str) -> Result:
        """Return a number by its key.

        Raises:
            CarambaError: no such key, with the nearest one.
        """
        need_name(key, self.results, f"key of {REPORT_FILE}", "get_experiment_results lists them")
        return self.results[key]

    def derive(self, operation: str, first: str, second: str) -> float:
        """Compute a number from two results.

        Raises:
            CarambaError: unknown operation or key, different units, or a division by zero.
        """
        need_name(operation, OPERATIONS, "operation", f"they are {', '.join(OPERATIONS)}")
        one, other = self.result(first), self.result(second)
        if one.unit != other.unit:
            raise CarambaError(f"{first} is in {one.unit or 'no unit'} and {second} in {other.unit or 'no unit'}")
        if operation == "difference":
            return one.value - other.value
        if other.value == 0:
            raise CarambaError(f"{second} is 0; nothing is relative to it")
        return one.value / other.value if operation == "ratio" else 100 * (one.value / other.value - 1)

    def check_claim(self, first: str, second: str, direction: str) -> None:
        """Check a comparison of two results.

        `less` and `more` need the sign and a difference beyond 1.96 standard errors, `equal` one within them. Results
        without dispersion are exact: their sign alone decides.

        Raises:
            CarambaError: an unknown direction or key, different units, or a comparison that does not hold.
        """
        need_name(direction, DIRECTIONS, "direction", f"they are {', '.join(DIRECTIONS)}")
        difference = self.derive("difference", first, second)
        one, other = self.result(first), self.result(second)
        margin = 1.96 * math.hypot(one.error_of_mean, other.error_of_mean)
        found = "equal" if abs(difference) <= margin else "less" if difference < 0 else "more"
        if found != direction:
            raise CarambaError(
                f"\\claim states {direction}; {first} is {one.value:g}, {second} {other.value:g}, within {margin:.3g} "
                f"of each other by chance: {found}"
            )


def read_artifact(file: Path, sha256: str) -> bytes:
    """Return the bytes of a file among the artifacts.

    Raises:
        ConfigError: the file is gone, a link, or not the one that was reported.
    """
    content = file.read_bytes() if file.is_file() and not file.is_symlink() else None
    if content is None or hashlib.sha256(content).hexdigest() != sha256:
        found = "no such file" if content is None else "its SHA-256 is not that of the file"
        raise ConfigError(
            f"{file}: {found} that {REPORT_FILE} lists; write the artifacts again with `caramba resume RUN`"
        )
    return content


def read_evidence(folder: Path, manifest_file: Path, group: str | None = None) -> Evidence:
    """Read the artifacts below `folder` (a run, or a group of one) and the manifest of its run.

    Raises:
        ConfigError: the run has no artifacts, or they cannot be read; the message has the fix.
    """
    file, fix = folder / "artifacts" / REPORT_FILE, f"write it, at the end of the run, with `caramba resume {folder}`"
    report = read_object(file, ConfigError, fix)
    try:
        proxy = report["labels"].get("proxy")
        entries = [(_file_name(entry["path"]), str(entry["sha256"])) for entry in report["artifacts"]]
        manifest = read_manifest(manifest_file)
        return Evidence(
            name=report["name"],
            run_id=report["run_id"] + (f"/groups/{group}" if group else ""),
            report_sha256=sha256_of(file),
            manifest_sha256=report["manifest_sha256"],
            proxy=proxy,
            results={key: _result(key, metric, proxy is not None) for key, metric in report["metrics"].items()},
            settings=dict(_settings(manifest, group, report)),
            figures={name: (file.parent / name, digest) for name, digest in entries if name.endswith(".png")},
            tables={table[1]: table[0] for name, digest in entries if name == TABLES_FILE
                    for table in _TABLE.finditer(read_artifact(file.parent / name, digest).decode())},
            files=tuple(name for name, _ in entries),
            failures=tuple(f"{item['id']}: {item['error']}" for item in report["failures"]),
            omitted=tuple(f"{item['name']}: {item['reason']}" for item in report["omitted"]),
            names=tuple(dict.fromkeys(_words(manifest.model_dump(mode="json")))),
        )  # fmt: skip
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"not a report of this version ({type(error).__name__}: {error})"
        raise ConfigError(f"{file}: {wrong}; {fix}") from None


def unit_tex(unit: str) -> str:
    """Return a unit behind a thin space; a ratio and a share have none to print."""
    return "" if unit in ("", "ratio", "share") else rf"\,{escape(unit)}"


def _file_name(path: object) -> str:
    """Return the name of an artifact, which becomes the name of a file of the paper too: never a path."""
    name = str(path)
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._@=,+-]*", name) is None:
        raise ValueError(f"artifact {name!r}: expected the name of a file in artifacts/, without folders")
    return name


def _result(key: str, metric: Mapping[str, Any], has_proxy: bool) -> Result:
    if not math.isfinite(metric["value"]):
        raise ValueError(f"metric {key} is {metric['value']}")
    parsed = parse_key(key)
    # Figures of the student alone need no teacher; all else names or compares with the teacher.
    rests = parsed.family in MODELLESS or not str(parsed.model).startswith("student")
    return Result(key, is_proxy=has_proxy and rests, **metric)


def _settings(manifest: Manifest, group: str | None, report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    groups = manifest.groups_to_run()
    chosen = next((item for item in groups if item.name == group), groups[0])
    shown = manifest.model_dump(mode="json", exclude=_UNTOLD)
    for path, value in _leaves(shown | chosen.model_dump(mode="json", include={"data", "runs", "benchmarks"})):
        if isinstance(value, bool):
            yield path, str(value).lower()
        elif isinstance(value, int | float):
            # Every digit, as a person would type it.
            yield path, typeset(f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else repr(value))
        elif value and len(value) <= 60:
            yield path, rf"\texttt{{{escape(value)}}}"
    for phase in report["phases"]:
        for name in ("steps", "tokens", "seconds"):
            if phase.get(name):
                yield f"phases.{phase['id']}.{name}", typeset(number(phase[name]))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf by its dotted path; an item of a list goes by its id where it has one, else by its place."""
    if is_mapping(value):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif is_sequence(value):
        for index, item in enumerate(value):
            name = item.get("id") if is_mapping(item) else None
            yield from _leaves(item, f"{path}.{index if name is None else name}")
    elif value is not None:
        yield path, value


def _words(plain: dict[str, Any]) -> Iterator[str]:
    for path, value in _leaves(plain):
        yield from path.split(".")
        if isinstance(value, str) and len(value) <= 60:
            yield value
