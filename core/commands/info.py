"""`python -m core.info` in a clone of the repository."""

import sys

from hookline.core.info.command import main

if __name__ == "__main__":
    sys.exit(main())
