"""Write each Metal source with its macros in place, once for each dtype, for Apple's compiler.

Usage: python scripts/metal_sources.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from caramba.kernels.metal.library import TYPES, source_of

DECODE = {"ROWS": 4, "KEYS": 32, "THREADS": 128, "COLUMNS": 1}
MACROS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("X", "W"),
    "rms_norm_backward": ("X", "W"),
    "layer_norm": ("X", "W"),
    "layer_norm_backward": ("X", "W"),
    "column_sums": ("W",),
    "rope": ("X", "TABLE", "Y"),
    "lion": ("P", "M", "G"),
    "dba_decode": ("Q", "SEM", "GEO", "VALUE"),
}
NUMBERS = {
    "dba_decode": DECODE,
    "rms_norm_backward": {"COLUMNS": 4},
    "layer_norm_backward": {"COLUMNS": 4},
}


def main(folder: Path) -> None:
    """Write all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, types in MACROS.items():
        for kind in TYPES.values():
            text = source_of(name, **dict.fromkeys(types, kind), **NUMBERS.get(name, {}))
            (folder / f"{name}_{kind}.metal").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
