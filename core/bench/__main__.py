"""`python -m core.bench`."""

import sys

from hookline.core.bench import main

if __name__ == "__main__":
    sys.exit(main())
