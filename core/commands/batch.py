"""`python -m core.batch` in a clone of the repository."""

import sys

from hookline.core.batch.command import main

if __name__ == "__main__":
    sys.exit(main())
