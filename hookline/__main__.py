"""`hookline`: the commands `python -m core.X` under one name. `hookline key=value` is `hookline run key=value`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from hookline.core import COMMANDS

USAGE = f"""\
usage: hookline [COMMAND] [ARGUMENTS]     commands: {", ".join(COMMANDS)}
       hookline COMMAND --help            what a command takes
       hookline key=value ...             the same as hookline run key=value ...
       hookline --version"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    first = given[0] if given else ""
    if first == "--version":
        import hookline

        print(f"hookline {hookline.__version__}")
        return 0
    if first in ("--help", "-h"):
        print(USAGE)
        return 0
    if first.isidentifier() and first not in COMMANDS:
        from hookline.core.util.text import near_miss

        hint = near_miss(first, COMMANDS)
        print(f"hookline: error: no command '{first}'.{hint} Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = given.pop(0) if first in COMMANDS else "run"
    exit_code: int = import_module(f"hookline.core.{command}").main(given)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
