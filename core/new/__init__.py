"""`hookline new KIND NAME`: write a distribution with a plugin of that kind, runnable and tested from the start.

Fills in the templates in two folders of core/new/templates: common/ and the folder of the kind. Imports no plugin and
no torch.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from hookline.core.new.command import main

    return main(arguments)
