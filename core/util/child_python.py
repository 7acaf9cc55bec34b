"""The command line of a child process that runs a function of ours, with the modules that this process would import."""

from __future__ import annotations

import json
import sys

_BOOT = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module, _, function = sys.argv[2].partition(":")
del sys.argv[1:3]
from hookline.core.util.garbage import imports_kept
with imports_kept():
    module = importlib.import_module(module)
sys.exit(getattr(module, function)())
"""


def python_command(target: str, *arguments: str) -> list[str]:
    """Run `target` ("module:function"), which finds the arguments in sys.argv[1:] and returns the exit code.

    -P keeps the working folder off the path, where a file named like a library's module would run in its place. The
    objects of imported modules are not searched for garbage: with torch, that takes a fifth of a start's processor
    time.
    """
    return [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), target, *arguments]
