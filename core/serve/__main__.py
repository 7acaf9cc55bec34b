"""`python -m core.serve`."""

import sys

from hookline.core.serve import main

if __name__ == "__main__":
    sys.exit(main())
