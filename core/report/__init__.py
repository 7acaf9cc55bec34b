"""A sweep's results as one HTML page, a Markdown table and PNG plots: `hookline report FOLDER`."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from hookline.core.report.command import main

    return main(arguments)
