"""`python -m core.warm`."""

import sys

from hookline.core.warm import main

if __name__ == "__main__":
    sys.exit(main())
