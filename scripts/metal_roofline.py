"""Write docs/benchmarks/metal_roofline.json: least times of the Metal kernels on paper, from bytes that the emulator
counted (metal_emulated.json) over the vendor's published memory bandwidth. Nothing is measured.

Usage: python scripts/metal_roofline.py
"""

from __future__ import annotations

import json
from pathlib import Path

from caramba.runs.files import write_atomic

FOLDER = Path(__file__).parents[1] / "docs/benchmarks"
BANDWIDTH = {
    "M1": (67, "Apple newsroom, 6 June 2022: M2 has 100 GB/s, 50% more than M1"),
    "M1 Max": (400, "Apple newsroom, 18 October 2021"),
    "M2": (100, "Apple newsroom, 6 June 2022"),
    "M2 Max": (400, "Apple newsroom, 17 January 2023"),
    "M3": (100, "Apple, MacBook Air (M3) technical specifications"),
    "M3 Max": (400, "Apple, MacBook Pro (M3 Max, 40-core GPU) technical specifications"),
    "M4": (120, "Apple newsroom, 7 May 2024"),
    "M4 Max": (546, "Apple newsroom, 30 October 2024"),
}
"""GB/s (10^9 bytes) and who published it."""


def main() -> None:
    counted = json.loads((FOLDER / "metal_emulated.json").read_text())["bytes"]
    result = {
        "benchmark": "metal_roofline",
        "made_by": "python scripts/metal_roofline.py",
        "hardware": "none",
        "measured": False,
        "what": "lower bounds: bytes that the emulator counted over published bandwidth; no kernel was timed",
        "bandwidth_gb_per_s": {
            chip: {"value": rate, "source": source} for chip, (rate, source) in BANDWIDTH.items()
        },
        "least_us": {
            name: {chip: round(row["bytes"] / rate / 1e3, 1) for chip, (rate, _) in BANDWIDTH.items()}
            for name, row in counted.items()
        },
    }
    write_atomic(FOLDER / "metal_roofline.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
