"""What was measured once on a kind of device and is read by every run on it: how attention runs.

`tuned.json` next to this file is the shipped table; `caramba tune` writes another, which has precedence.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from caramba.config.layer import AttentionLayerConfig
from caramba.errors import ConfigError
from caramba.runs.files import home, write_json
from caramba.runtime.device import prefers_cudnn

FORMAT = 1
SHIPPED = Path(__file__).with_name("tuned.json")
BACKENDS = ("cudnn", "flash", "efficient", "math")
PADDED = ", padded"
"""After a backend's name: keys and values were widened to one width, which some backends need."""
VARLEN = "varlen"
FLEX = "flex"
DOCUMENT_WAYS = (VARLEN, FLEX)
"""Methods besides the backends that mask documents without a dense mask. Flex is measured only; no run uses it."""
REFUSED = 10.0  # what a backend that refuses a shape counts for, in times of the fastest


@dataclass(frozen=True)
class Family:
    """Shapes of attention that share a backend: widths of a head's key and value, and how it is used.

    `is_grouped`: fewer key/value heads than query heads. `is_masked`: with a mask of documents, in place of plain
    causality. `trains`: forward and backward, in place of the forward of a prefill.
    """

    d_qk: int
    d_v: int
    is_grouped: bool = False
    is_masked: bool = False
    trains: bool = True

    def distance(self, other: "Family") -> float:
        """Return how unlike two families are: octaves of width, and 4 for each flag."""
        widths = abs(math.log2(self.d_qk / other.d_qk)) + abs(math.log2(self.d_v / other.d_v))
        flags = (
            (self.is_grouped, other.is_grouped),
            (self.is_masked, other.is_masked),
            (self.trains, other.trains),
            (self.d_qk == self.d_v, other.d_qk == other.d_v),
        )
        return widths + 4.0 * sum(ours != theirs for ours, theirs in flags)


@dataclass(frozen=True)
class BackendTimings:
    """Milliseconds of one family by candidate, a backend's name, perhaps with `PADDED`; a refusal is None.

    `refused`: why, by candidate.
    """

    family: Family
    ms: dict[str, float | None]
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionChoice:
    """The order in which backends are tried, None for torch's own, and whether two widths are left as they are.

    `uses_varlen`: documents of a row are attended to by variable-length kernels where there is one, which holds unless
    a mask was measured to be faster.
    measured_ms: the table's milliseconds that the order comes of, `WIDTHxWIDTH.CANDIDATE`, empty without a table.
    """

    order: tuple[str, ...] | None
    keeps_two_widths: bool
    source: str
    uses_varlen: bool = True
    measured_ms: dict[str, float] = field(default_factory=dict)


def tuning_path() -> Path:
    """Return the default output file of `caramba tune`."""
    return home() / "tuned.json"


def device_name(device: torch.device) -> str:
    """Return the name under which a table has a device: the GPU's, or the type of anything else."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def read_tables(path: Path) -> dict[str, Any]:
    """Return device name -> what was measured on it, as it is in the file.

    Raises:
        ConfigError: the file is no table.
    """
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']}, expected {FORMAT}")
        for name in raw["devices"]:
            attention_rows(raw["devices"][name])
            if not isinstance(raw["devices"][name].get("machine", {}), dict):
                raise ValueError(f"machine of {name} is not a mapping")
            decode = raw["devices"][name].get("decode", {})
            if not all(isinstance(way, dict) for way in decode.values()):
                raise ValueError(f"decode of {name} is not a mapping of mappings")
        return dict(raw["devices"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a table of caramba tune ({type(error).__name__}: {error}); delete it, or make it again with "
            "caramba tune"
        ) from error


def write_table(
    path: Path,
    name: str,
    machine: dict[str, Any],
    rows: Sequence[BackendTimings],
    decode: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Put a device's attention rows, and choices of the decode kernel, into the table at `path`, written whole.

    All else stays, what was not measured again too, unless another torch measured it.
    """
    devices = read_tables(path) if path.is_file() else {}
    before = devices.get(name, {})
    if before.get("machine", {}).get("torch") == machine["torch"]:
        measured = {row.family for row in rows}
        rows = [*rows, *(row for row in attention_rows(before) if row.family not in measured)]
        decode = {**before.get("decode", {}), **(decode or {})}
    listed = [{**asdict(row.family), "ms": row.ms, "refused": row.refused} for row in rows]
    devices[name] = {**before, "machine": machine, "attention": listed, "decode": decode or {}}
    write_json(path, {"format": FORMAT, "devices": devices})


def attention_rows(entry: dict[str, Any]) -> list[BackendTimings]:
    """Return the attention rows in a device's entry of a table.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    rows = []
    for item in entry["attention"]:
        values = dict(item)
        ms = {name: None if time is None else float(time) for name, time in values.pop("ms").items()}
        refused = {name: str(reason) for name, reason in values.pop("refused", {}).items()}
        unknown = {name.removesuffix(PADDED) for name in ms} - {*BACKENDS, *DOCUMENT_WAYS}
        if unknown or all(time is None for time in ms.values()):
            raise ValueError(f"attention has {sorted(ms)}, expected a time of one of {', '.join(BACKENDS)}")
        if any(time is not None and not 0 < time < math.inf for time in ms.values()):
            raise ValueError(f"attention has times {ms}, expected milliseconds above 0")
        family = Family(**values)
        flags = (family.is_grouped, family.is_masked, family.trains)
        if any(type(width) is not int or width < 1 for width in (family.d_qk, family.d_v)) or any(
            not isinstance(flag, bool) for flag in flags
        ):
            raise ValueError(f"attention has a family {values}, expected widths of 1 or more, and true or false")
        rows.append(BackendTimings(family, ms, refused))
    return rows


def choose_attention(device: torch.device, families: Iterable[Family] = ()) -> AttentionChoice:
    """Choose the backends of a run from the table that has its device: the user's, then the shipped one.

    Without either, cuDNN leads from Hopper on, and torch's own order holds elsewhere.

    Raises:
        ConfigError: the user's table cannot be read.
    """
    name = device_name(device)
    for path in (tuning_path(), SHIPPED):
        entry = read_tables(path).get(name) if path.is_file() else None
        rows = attention_rows(entry) if entry is not None else []
        if rows:
            nearest = _nearest(rows, families)
            choice = rank(nearest or rows, f"measured on {name} ({_short(path)})")
            return replace(choice, measured_ms=_milliseconds(nearest))
    if prefers_cudnn(device):
        return AttentionChoice(BACKENDS, True, f"{name} is in no table; from Hopper on cuDNN leads")
    return AttentionChoice(None, False, f"{name} is in no table: torch picks by shape (caramba tune measures)")


def decode_choices(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the decode kernel's configs for a device from the user's table, by the kernel's key of a shape.

    Raises:
        ConfigError: the user's table cannot be read.
    """
    entry = read_tables(tuning_path()).get(device_name(device), {}) if tuning_path().is_file() else {}
    return dict(entry.get("decode", {}))


def rank(rows: Sequence[BackendTimings], source: str) -> AttentionChoice:
    """Order the backends by the geometric mean, over rows, of their time over the row's best.

    Rows of two widths decide whether the narrower is padded, by the best backend with and without padding. No backend
    is tried after math, which supports every shape.
    """
    as_is, padded = (_means(rows, pads) for pads in (False, True))
    if any(row.family.d_qk != row.family.d_v for row in rows):
        keeps = min(as_is.values()) <= min(padded.values())
    else:
        keeps = as_is["cudnn"] == min(as_is.values())  # the one that is known to take two widths
    means = as_is if keeps else padded
    # Math, measured on a CPU only, sorts last where it was not.
    order = sorted(means, key=lambda backend: (means[backend], BACKENDS.index(backend)))
    return AttentionChoice(tuple(order[: order.index("math") + 1]), keeps, source, _varlen_leads(rows))


def families_of(configs: Iterable[AttentionLayerConfig], is_masked: bool = False) -> list[Family]:
    """Return the families that training on the layers of a model runs, on rows of documents or of plain text."""
    found: dict[Family, None] = {}
    for config in configs:
        dims = config.dims()
        if config.is_latent:  # in training keys and values are expanded to every head, see LatentProjection
            found[Family(config.query_dim + dims.rope, config.query_dim, is_masked=is_masked)] = None
        else:
            found[Family(dims.qk, dims.v, dims.n_heads != dims.n_kv_heads, is_masked)] = None
    return list(found)


def _milliseconds(rows: Iterable[BackendTimings]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        family = row.family
        words = [("grouped", family.is_grouped), ("masked", family.is_masked)]
        shape = " ".join([f"{family.d_qk}x{family.d_v}", *(word for word, holds in words if holds)])
        found |= {f"{shape}.{name}_ms": time for name, time in row.ms.items() if time is not None}
    return found


def _means(rows: Sequence[BackendTimings], pads: bool) -> dict[str, float]:
    """Backend -> geometric mean of its slowness, widened to one width or as it is."""
    found = {}
    for backend in BACKENDS:
        logs = []
        for row in rows:
            best = _fastest_backend(row)
            two_widths = row.family.d_qk != row.family.d_v
            time = row.ms.get(backend + PADDED if pads and two_widths else backend)
            logs.append(math.log(REFUSED if time is None else min(REFUSED, time / best)))
        found[backend] = math.exp(sum(logs) / len(logs)) if logs else 1.0
    return found


def _fastest_backend(row: BackendTimings) -> float:
    """Milliseconds of the fastest backend of scaled_dot_product_attention, infinite where all refuse."""
    times = (time for name, time in row.ms.items() if name not in DOCUMENT_WAYS)
    return min((time for time in times if time is not None), default=math.inf)


def _varlen_leads(rows: Sequence[BackendTimings]) -> bool:
    """Whether variable-length attention takes less time than the fastest backend with a mask, in the geometric mean."""
    logs = []
    for row in rows:
        if VARLEN in row.ms:
            time, best = row.ms[VARLEN], _fastest_backend(row)
            slowness = REFUSED if time is None else min(REFUSED, max(1 / REFUSED, time / best))
            logs.append(math.log(slowness))
    return sum(logs) <= 0


def _nearest(rows: Sequence[BackendTimings], families: Iterable[Family]) -> list[BackendTimings]:
    return [min(rows, key=lambda row: row.family.distance(family)) for family in families]


def _short(path: Path) -> str:
    return "shipped with caramba" if path == SHIPPED else str(path)
