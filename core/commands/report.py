"""`python -m core.report` in a clone of the repository."""

import sys

from hookline.core.report.command import main

if __name__ == "__main__":
    sys.exit(main())
