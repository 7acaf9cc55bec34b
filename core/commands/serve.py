"""`python -m core.serve` in a clone of the repository."""

import sys

from hookline.core.serve.command import main

if __name__ == "__main__":
    sys.exit(main())
