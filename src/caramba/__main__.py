"""`python -m caramba`: the same as the `caramba` script."""

from caramba.cli import main
from caramba.runs.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main())
