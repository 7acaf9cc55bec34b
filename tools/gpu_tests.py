"""Runs test files until a time is up, those of engines in one process: a line for each file, and which are left.

    python tools/gpu_tests.py --seconds 500                                  # all that need a GPU
    python tools/gpu_tests.py --seconds 500 --processes 8                    # those of kernels, which compile, in 8
    python tools/gpu_tests.py --seconds 500 --from tests/test_gpu_memory.py  # what an earlier run left
    python tools/gpu_tests.py tests/test_gpu_grammar.py -- -k mask           # these files; arguments of pytest

Engines are alone on the card in one process, as they must leave nothing behind them; then pytest-xdist spreads the
tests of kernels over `--processes`, in the files' order. A line is JSON: {file, passed, failed, skipped, seconds,
left}, the last one of a file counts; the first line is {files: {file: tests}}. A failed test is told at once, with the
end of its traceback. An installed hookline is what is tested.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hookline  # noqa: F401  before pytest puts the tree's folder first on the path, here and in each worker

ROOT = Path(__file__).resolve().parents[1]
KERNELS = (
    "tests/plugins/test_*triton*.py",
    "tests/plugins/test_flash_attn_kernels.py",
    "tests/plugins/test_cublaslt.py",
)
"""Files that need no engine and little memory, so that several processes can share the card."""
PATTERNS = ("tests/test_gpu_*.py", *KERNELS)
"""The files that need a GPU, or that do something else where there is one."""
TOLD_EVERY_S = 10.0
"""How long a file may say nothing, for whoever ends this process."""
TRACEBACK_LINES = 20
CHUNK = 8
"""Tests that a process takes at once: neighbours often share a kernel, which is then compiled in one process."""


class TimeLimit:
    """A plugin of pytest, in each process that runs tests: no test begins after this time (of time.monotonic)."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        if time.monotonic() < self.ends_at:
            return None
        item.session.shouldstop = "the time is up"
        return True


class Worker(TimeLimit):
    """The same in a worker of pytest-xdist, which also keeps to the order of the files."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> Generator[None]:
        places = {item: place for place, item in enumerate(items)}
        yield
        items.sort(key=places.__getitem__)


def pytest_configure(config: Any) -> None:
    """Called where pytest loads this module by its name, as workers do."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(config.workerinput["ends_at"]), "time limit")


class Files:
    """A plugin of pytest where results come together: counts outcomes by file. part: as in main."""

    def __init__(self, ends_at: float, part: str | None) -> None:
        self._ends_at, self._part = ends_at, part
        self._told_at: defaultdict[str, float] = defaultdict(time.monotonic)
        self._done: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()
        """Tests of each file."""
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_sessionstart(self, session: Any) -> None:
        self._reporter = session.config.pluginmanager.get_plugin("terminalreporter")

    def pytest_collection_finish(self, session: Any) -> None:
        self._collected([item.nodeid for item in session.items])
        if self._part == "engines":
            session.items[:] = [item for item in session.items if not is_of_kernels(item.nodeid)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["ends_at"] = self._ends_at

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self.numbers:  # all workers have the same
            self._collected(ids)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self._of(report.nodeid)["failed"]:  # or each worker would add it
            self._failed(report)
        elif report.skipped:
            self._of(report.nodeid)["skipped"] += 1

    def pytest_runtest_logreport(self, report: Any) -> None:
        found = self._of(report.nodeid)
        found["seconds"] += report.duration
        if report.failed:
            self._failed(report)
        elif report.when == "call" or report.skipped:
            found[report.outcome] += 1

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name = file_of(nodeid)
        self._done[name] += 1
        if self._left(name) == 0 or time.monotonic() > self._told_at[name] + TOLD_EVERY_S:
            self._tell(name)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._done[file_of(crashitem)] += 1  # a test whose worker is gone

    def pytest_sessionfinish(self) -> None:
        for name in self.found:
            if self._left(name):
                self._tell(name)

    def _collected(self, nodeids: list[str]) -> None:
        self.numbers.update(map(file_of, nodeids))
        self._say(json.dumps({"files": self.numbers}))
        for name in self.found:
            self._tell(name)

    def _failed(self, report: Any) -> None:
        self._of(report.nodeid)["failed"].append(report.nodeid)
        self._say("\n".join(["", f"FAILED {report.nodeid}", *report.longreprtext.splitlines()[-TRACEBACK_LINES:]]))
        self._tell(file_of(report.nodeid))

    def _tell(self, name: str) -> None:
        self._told_at[name] = time.monotonic()
        found = self.found[name]
        told = {"file": name, **found, "seconds": round(found["seconds"], 1), "left": self._left(name)}
        self._say("\n" + json.dumps(told))  # behind its dots

    def _say(self, text: str) -> None:
        self._reporter.write_line(text)
        self._reporter.flush()

    def _left(self, name: str) -> int:
        return self.numbers[name] - self._done[name]

    def _of(self, nodeid: str) -> dict[str, Any]:
        empty = {"passed": 0, "failed": [], "skipped": 0, "seconds": 0.0}
        return self.found.setdefault(file_of(nodeid), empty)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def is_of_kernels(name: str) -> bool:
    return any(Path(file_of(name)).match(pattern) for pattern in KERNELS)


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
    parser.add_argument("--processes", type=int, default=1, help="for the kernels' tests")
    parser.add_argument("--part", choices=("engines", "kernels"), help=argparse.SUPPRESS)  # that this process runs
    options = parser.parse_args(ours)
    names, ends_at = files_from(options.files, options.first), time.monotonic() + options.seconds
    if options.part is None and options.processes > 1 and any(map(is_of_kernels, names)):
        if find_spec("xdist") is not None:
            return run_parts(names, ends_at, options.processes, behind)
        print("pytest-xdist is not installed: one process runs all tests", flush=True)
    given = ["-q", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--rootdir={ROOT}"]
    plugins: list[Any] = [Files(ends_at, options.part)]
    if options.part == "kernels":
        # pytest-benchmark warns beside xdist, and warnings are errors
        spread = ["-n", str(options.processes), "--dist", "load", "--maxschedchunk", str(CHUNK), "-p", "no:benchmark"]
        given += [*spread, "-p", Path(__file__).stem]
    else:
        given += ["-p", "no:xdist"]
        plugins.append(TimeLimit(ends_at))
    return int(pytest.main([*names, *given, *behind], plugins=plugins))


def run_parts(names: list[str], ends_at: float, num_processes: int, behind: list[str]) -> int:
    """Engines' tests, then kernels', each in a process that leaves nothing on the card; the first counts all tests."""
    kernels = [name for name in names if is_of_kernels(name)]
    parts = {"kernels": kernels} if kernels == names else {"engines": names, "kernels": kernels}
    codes = list[int]()
    for part, some in parts.items():
        seconds = ends_at - time.monotonic()
        if codes and seconds <= 0:
            codes.append(pytest.ExitCode.INTERRUPTED)
            continue
        ours = ["--part", part, "--processes", str(num_processes), "--seconds", str(seconds)]
        codes.append(subprocess.run([sys.executable, __file__, *ours, *some, "--", *behind], check=False).returncode)
    return next((code for code in codes if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)), min(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
