"""`python -m caramba.launch`."""

import sys

from caramba.launch import main
from caramba.runs.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
