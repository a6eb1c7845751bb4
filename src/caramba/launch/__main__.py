"""`python -m caramba.launch`."""

import sys

from caramba.launch import main
from caramba.runs.ending import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
