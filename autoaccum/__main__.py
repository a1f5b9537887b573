"""``python -m autoaccum``: the command line without its console script, as torchrun starts it."""

import sys

from autoaccum.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
