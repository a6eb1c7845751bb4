"""`python -m caramba`: the same as the `caramba` script."""

import sys

from caramba.cli import main

if __name__ == "__main__":
    sys.exit(main())
