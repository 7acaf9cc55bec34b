"""Runs test files one after the other in one process until a time is up: a line for each, and which are left.

    python tools/gpu_tests.py --seconds 500                                  # all that need a GPU
    python tools/gpu_tests.py --seconds 500 --from tests/test_gpu_memory.py  # what an earlier run left
    python tools/gpu_tests.py tests/test_gpu_grammar.py -- -k mask           # these files; arguments of pytest

One process, as engines must leave nothing behind them. A line is JSON: {file, passed, failed, skipped, seconds, left},
the last one of a file counts; the first line is {files: {file: tests}}. An installed hookline is what is tested.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "tests/test_gpu_*.py",
    "tests/plugins/test_*triton*.py",
    "tests/plugins/test_flash_attn_kernels.py",
    "tests/plugins/test_cublaslt.py",
)
"""The files that need a GPU, or that do something else where there is one."""
TOLD_EVERY_S = 10.0
"""How long a file may say nothing, for whoever ends this process."""


class Files:
    """A plugin of pytest: counts outcomes by file, and stops behind the test in which the time is up."""

    def __init__(self, ends_at: float) -> None:
        self._ends_at, self._told_at, self._session = ends_at, time.monotonic(), None
        self.numbers: Counter[str] = Counter()
        """Tests of each file."""
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        self._session, self._say = session, session.config.pluginmanager.get_plugin("terminalreporter").write_line
        self.numbers.update(file_of(item.nodeid) for item in session.items)
        self._say(json.dumps({"files": self.numbers}))
        for name in self.found:
            self._tell(name)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._of(file_of(report.nodeid))["failed"].append(report.nodeid)
        elif report.skipped:
            self._of(file_of(report.nodeid))["skipped"] += 1

    def pytest_runtest_logreport(self, report: Any) -> None:
        found = self._of(file_of(report.nodeid))
        found["seconds"] += report.duration
        if report.failed:
            found["failed"].append(report.nodeid)
        elif report.when == "call" or report.skipped:
            found[report.outcome] += 1

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name = file_of(nodeid)
        found = self._of(name)
        found["left"] -= 1
        now = time.monotonic()
        is_over = now > self._ends_at
        if found["left"] == 0 or is_over or now > self._told_at + TOLD_EVERY_S:
            self._told_at = now
            self._tell(name)
        if is_over and self._session is not None:
            self._session.shouldstop = "the time is up"

    def _tell(self, name: str) -> None:
        found = self.found[name]
        self._say("\n" + json.dumps({"file": name, **found, "seconds": round(found["seconds"], 1)}))  # behind its dots

    def _of(self, name: str) -> dict[str, Any]:
        empty = {"passed": 0, "failed": [], "skipped": 0, "seconds": 0.0, "left": self.numbers[name]}
        return self.found.setdefault(name, empty)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def files_from(names: list[str], first: str | None) -> list[str]:
    """These files, or all that need a GPU, from `first` on.

    Raises: SystemExit if it is not among them.
    """
    if not names:
        names = [str(path.relative_to(ROOT)) for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
    if first is None:
        return names
    if first not in names:
        raise SystemExit(f"--from {first} is none of: {' '.join(names)}")
    return names[names.index(first) :]


def main(arguments: list[str]) -> int:
    ours, behind = arguments, list[str]()
    if "--" in arguments:
        ours, behind = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="default: all that need a GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no test begins after so many")
    parser.add_argument("--from", dest="first", help="leave out the files before this one")
    options = parser.parse_args(ours)
    importlib.import_module("hookline")  # before pytest puts the tree's folder first on the path
    files = Files(time.monotonic() + options.seconds)
    given = [
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        f"--rootdir={ROOT}",
        *behind,
    ]
    return int(pytest.main([*files_from(options.files, options.first), *given], plugins=[files]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
