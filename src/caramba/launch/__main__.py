"""`python -m caramba.launch`."""

import sys

from caramba.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
