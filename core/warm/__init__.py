"""`hookline warm model=NAME [card=h200]`: compiles an engine's kernels into Triton's cache, for an image.

Needs no GPU if the card is named. Importing it imports neither torch nor Triton.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from hookline.core.warm.command import main

    return main(arguments)
