"""`python -m tests.chaos`: what `make chaos` runs."""

import sys

from tests.chaos.suite import main

sys.exit(main())
