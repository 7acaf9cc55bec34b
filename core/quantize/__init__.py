"""`hookline quantize SOURCE TARGET quantization=NAME`: writes a quantised checkpoint in a published layout."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from hookline.core.quantize.command import main

    return main(arguments)
