"""`python -m core.new` in a clone of the repository."""

import sys

from hookline.core.new.command import main

if __name__ == "__main__":
    sys.exit(main())
