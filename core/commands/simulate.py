"""`python -m core.simulate` in a clone of the repository."""

import sys

from hookline.core.simulate.command import main

if __name__ == "__main__":
    sys.exit(main())
