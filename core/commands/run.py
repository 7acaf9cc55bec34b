"""`python -m core.run` in a clone of the repository."""

import sys

from hookline.core.run.command import main

if __name__ == "__main__":
    sys.exit(main())
