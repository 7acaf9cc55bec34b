"""`python -m core.bench` in a clone of the repository."""

import sys

from hookline.core.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
