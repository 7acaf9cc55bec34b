"""`python -m core.simulate`."""

import sys

from hookline.core.simulate import main

if __name__ == "__main__":
    sys.exit(main())
