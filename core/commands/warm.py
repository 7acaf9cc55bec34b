"""`python -m core.warm` in a clone of the repository."""

import sys

from hookline.core.warm.command import main

if __name__ == "__main__":
    sys.exit(main())
