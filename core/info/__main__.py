"""`python -m core.info`."""

import sys

from hookline.core.info import main

if __name__ == "__main__":
    sys.exit(main())
