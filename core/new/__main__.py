"""`python -m core.new`."""

import sys

from hookline.core.new import main

if __name__ == "__main__":
    sys.exit(main())
