"""`python -m caramba`: the same as the `caramba` script."""

from caramba.cli import main
from caramba.runs.ending import leave

if __name__ == "__main__":
    leave(main())
