"""`python -m core.report`."""

import sys

from hookline.core.report import main

if __name__ == "__main__":
    sys.exit(main())
