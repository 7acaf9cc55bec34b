"""`python -m core.quantize` in a clone of the repository."""

import sys

from hookline.core.quantize.command import main

if __name__ == "__main__":
    sys.exit(main())
