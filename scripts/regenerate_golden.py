"""Write tests/golden/losses.json, the recorded losses of the tiny recipes. Nothing else writes that file.

Usage: python scripts/regenerate_golden.py            (prints what changed)
Run it only for a change that is meant to alter numbers, and say why in the commit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.golden.recipes import LOSSES, here, run_recipes


def main() -> int:
    with TemporaryDirectory() as name:
        measured = run_recipes(Path(name))
    before = json.loads(LOSSES.read_text())["losses"] if LOSSES.is_file() else {}
    changed = [recipe for recipe, losses in measured.items() if before.get(recipe) != losses]
    LOSSES.write_text(json.dumps({"recorded_on": here(), "losses": measured}, indent=2) + "\n")
    print(f"{LOSSES}: changed {', '.join(changed) or 'nothing'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
