"""Prepares FineWeb as `caramba prepare fineweb` does: python scripts/prepare_fineweb.py --tokens 100M --output DIR."""

from __future__ import annotations

import sys

from caramba.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "fineweb", *sys.argv[1:]]))
