"""`python -m core.run`."""

import sys

from hookline.core.run import main

if __name__ == "__main__":
    sys.exit(main())
