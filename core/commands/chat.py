"""`python -m core.chat` in a clone of the repository."""

import sys

from hookline.core.chat.command import main

if __name__ == "__main__":
    sys.exit(main())
