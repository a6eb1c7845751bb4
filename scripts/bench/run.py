"""Run one benchmark: python scripts/bench/run.py CASE [options], or --list for the cases.

Every case writes one JSON file, by default docs/benchmarks/CASE.json, that report.py makes docs/benchmarks.md from.
"""

from __future__ import annotations

import sys

from record import Record
from registry import UsageError, case_names, load_case

from caramba.errors import ConfigError
from caramba.runtime import choose_device


def main(argv: list[str] | None = None) -> int:
    """Return the case's exit status: 0, 1 for a failure, 2 for a mistake in the options."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "--list"):
        print((__doc__ or "").splitlines()[0])
        for name in case_names():
            print(f"  {name:22} {load_case(name).summary}")
        return 0
    try:
        case = load_case(words[0])
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parser = case.parser()
    options = parser.parse_args(words[1:])
    try:
        record = Record(case.name, options.out, words, choose_device(options.device))
        return case.module.run(options, record) or 0
    except (UsageError, ConfigError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
