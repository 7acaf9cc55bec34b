"""`python -m core.batch`."""

import sys

from hookline.core.batch import main

if __name__ == "__main__":
    sys.exit(main())
