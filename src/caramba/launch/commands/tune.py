"""`caramba tune`: command-line words to a table that every later run on this machine reads."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.launch.commands.arguments import HelpArguments, real
from caramba.lower.tune.attention import FAMILIES, measure_family
from caramba.lower.tune.decode import tune_decode
from caramba.ops import TRITON_AVAILABLE
from caramba.runtime import AttentionChoice, choose_attention, choose_device, device_facts
from caramba.runtime.tuned import (
    BACKENDS,
    DOCUMENT_WAYS,
    SHIPPED,
    BackendTimings,
    Family,
    attention_rows,
    device_name,
    rank,
    read_tables,
    tuning_path,
    write_table,
)

SECONDS = 300.0
CUDA_ONLY = (*DOCUMENT_WAYS, *(name for name in BACKENDS if name not in ("flash", "math")))
ATTENTION_SHARE = 0.25  # of the time; compiling the decode kernel takes most of the rest


def main(argv: list[str]) -> int:
    """Run `caramba tune ARGV` and return its exit status.

    Raises:
        ConfigError: a word that is not understood, a device that is not here, or a table that cannot be read or
            written.
    """
    words = [word for word in argv if word != "--debug"]
    logger.quiet = logger.quiet or "--quiet" in words
    given = _parser().parse_args([word for word in words if word != "--quiet"])
    device = choose_device(given.device)
    if device.type == "mps":
        raise ConfigError("tune: device 'mps' has one attention backend, nothing to choose; use --device cpu or cuda")
    out = tuning_path() if given.out is None else Path(given.out).expanduser()
    if out.is_dir():
        raise ConfigError(f"tune: --out {out} is a folder, expected a file; use --out {out / 'tuned.json'}")
    if given.show:
        _show(device, out if given.out else None)
        return 0
    if out.is_file():
        read_tables(out)  # a file that is none of ours is found out before the measurement, not after
    _need_place(out)
    has_kernel = device.type == "cuda" and TRITON_AVAILABLE
    rows = tune_attention(device, given.seconds * (ATTENTION_SHARE if has_kernel else 1.0))
    name = device_name(device)
    machine = device_facts(device) | {"cudnn": torch.backends.cudnn.version()}
    write_table(out, name, machine, rows)  # now, so that an interrupt does not lose it
    if has_kernel:
        write_table(out, name, machine, rows, tune_decode(device, given.seconds * (1 - ATTENTION_SHARE)))
    _table(name, rows)
    logger.info(f"{name}: {_chosen(rank(rows, ''))}")
    if device.type != "cuda":
        logger.info(
            f"these rows are {name} only, in float32 on small shapes; {', '.join(CUDA_ONLY)} and the decode kernel are "
            "measured where there is CUDA, whose runs read rows of their own or those shipped"
        )
    if out == tuning_path():
        logger.success(f"{out}; every run from this folder on {name} reads it")
    else:
        logger.success(f"{out}; runs read {tuning_path()}: copy it there, or set CARAMBA_HOME to its folder")
    return 0


def _need_place(out: Path) -> None:
    """Refuse a file that cannot be written, before what is to stand in it is measured."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"tune: {out} cannot be written ({error.strerror}); give another file by --out, or set CARAMBA_HOME to a "
            "folder that can"
        ) from None


def tune_attention(device: torch.device, seconds: float, families: Sequence[Family] = FAMILIES) -> list[BackendTimings]:
    """Measure the families in order of importance until the time is spent; the first is measured in any case.

    Raises:
        ConfigError: no backend runs any family here.
    """
    ends = time.perf_counter() + seconds
    rows: list[BackendTimings] = []
    for done in logger.progress(len(families), "attention backends"):
        left = ends - time.perf_counter()
        if done and left <= 0:
            continue
        row, refused = measure_family(families[done], device, max(0.0, left) / (len(families) - done))
        if any(ms is not None for ms in row.ms.values()):
            rows.append(row)
        else:
            logger.warning(f"tune: no backend runs {_name(families[done])}: {next(iter(refused.values()))}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not rows:
        raise ConfigError(f"tune: no attention backend runs on {device_name(device)}; update torch or the driver")
    if time.perf_counter() > ends and len(rows) < len(families):
        logger.warning(
            f"tune: {seconds:g} s were enough for {len(rows)} of {len(families)} families of shapes; "
            "raise --seconds for the others"
        )
    return rows


def _show(device: torch.device, path: Path | None) -> None:
    name = device_name(device)
    if path is not None and not path.is_file():
        raise ConfigError(f"tune: --out {path}: no such file to show")
    for place in (path,) if path is not None else (tuning_path(), SHIPPED):
        devices = read_tables(place) if place.is_file() else {}
        if name in devices:
            logger.path(place, "table")
            machine = devices[name].get("machine", {})
            logger.info(", ".join(f"{key} {value}" for key, value in machine.items() if isinstance(value, str)))
            _table(name, attention_rows(devices[name]))
            decode = len(devices[name].get("decode", {}))
            logger.info(f"decode attention: {f'{decode} shapes measured' if decode else 'not measured'}")
            others = [other for other in devices if other != name]
            if others:
                logger.info(f"the table has also {', '.join(others)}")
            break
    else:
        if path is not None:
            raise ConfigError(f"tune: {path} has no {name}; it has {', '.join(devices) or 'nothing'}")
    if path is None:
        choice = choose_attention(device)
        logger.info(f"{name}: {_chosen(choice)}; {choice.source}")


def _table(name: str, rows: Sequence[BackendTimings]) -> None:
    candidates = list(dict.fromkeys(candidate for row in rows for candidate in row.ms))
    cells = [[_name(row.family), *(_milliseconds(row.ms, candidate) for candidate in candidates)] for row in rows]
    logger.table(f"attention on {name}, ms", ["family", *candidates], cells)
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        for candidate, reason in row.refused.items():
            reasons[candidate, reason] = reasons.get((candidate, reason), 0) + 1
    for (candidate, reason), count in reasons.items():
        logger.info(f"{candidate} refuses {count} of {len(rows)} families: {reason}")


def _milliseconds(ms: dict[str, float | None], candidate: str) -> str:
    time_ms = ms.get(candidate)
    if candidate not in ms:
        return "-"
    return "refuses" if time_ms is None else f"{time_ms:.4g}"


def _name(family: Family) -> str:
    parts = [f"{family.d_qk}/{family.d_v}", "train" if family.trains else "prefill"]
    parts += ["grouped"] * family.is_grouped + ["documents"] * family.is_masked
    return " ".join(parts)


def _chosen(choice: AttentionChoice) -> str:
    order = "torch's own order" if choice.order is None else ", ".join(choice.order)
    return order if choice.uses_varlen else f"{order}; documents by a mask, which is faster than varlen"


def _parser() -> argparse.ArgumentParser:
    parser = HelpArguments(prog="caramba tune", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--seconds",
        type=real(lambda s: s > 0, "got {text!r}, expected a number of seconds above 0"),
        default=SECONDS,
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--out")
    parser.add_argument("--show", action="store_true")
    return parser
