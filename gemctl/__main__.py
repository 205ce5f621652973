"""`python -m gemctl` is `gemctl`."""

import sys

from gemctl.cli import main

if __name__ == "__main__":
    sys.exit(main())
