"""A script that answers questions, each in a fork of itself: what it imports is imported once, and no answer changes
what the next one finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def answer_all(answer: Callable[..., Any]) -> None:
    """The end of such a script: answer each line of the standard input, a JSON list of arguments, with a line of JSON.

    What `answer` prints goes to the standard error. A line is empty if it raised.
    """
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            told = os.fdopen(os.dup(1), "w")
            os.dup2(2, 1)
            code = 1
            try:
                told.write(json.dumps(answer(*json.loads(line))) + "\n")
                told.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        if os.waitpid(pid, 0)[1]:
            print(flush=True)


def compiling_environment() -> dict[str, str]:
    """Of a process that imports what this one does, and compiles the Triton kernels which this one interprets."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class AskedScript:
    """A process of a script that ends with `answer_all`."""

    def __init__(self, script: Path, environ: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen([sys.executable, str(script)], env=dict(environ), text=True, **pipes)

    def ask(self, *arguments: Any) -> Any:
        """Its answer. Raises: AssertionError with what it reported if it has none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline().strip()
        if not line:
            self._errors.seek(0)
            raise AssertionError(self._errors.read().decode()[-3000:])
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.communicate()
        self._errors.close()
