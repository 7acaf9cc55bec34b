"""Runs test files until a time is up, those of engines in one process: a line for each file, and which are left.

    python tools/gpu_tests.py --seconds 500                                  # all that need a GPU
    python tools/gpu_tests.py --seconds 500 --processes 8                    # those of kernels, which compile, in 8
    python tools/gpu_tests.py --seconds 500 --processes 48 --cards 4         # and engines of one GPU on four at once
    python tools/gpu_tests.py --seconds 500 --from tests/test_gpu_memory.py  # what an earlier run left
    python tools/gpu_tests.py tests/test_gpu_grammar.py -- -k mask           # these files; arguments of pytest

Engines are alone on the card in one process, as they must leave nothing behind them. With `--cards`, only files whose
engines take several GPUs run in that process; behind it each GPU has a process for the other files. At last
pytest-xdist spreads the tests of kernels over `--processes` and the GPUs, in the files' order. A line is JSON: {file,
passed, failed, skipped, seconds, left}, the last one of a file counts; the first line is {files: {file: tests}}. A
failed test is told at once, with the end of its traceback. An installed hookline is what is tested.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
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
PARTS = ("engines", "engines_of_one_gpu", "kernels")
"""What a process runs, in this order."""
SEVERAL_GPUS = tuple(f"tests/test_gpu_{name}.py" for name in ("memory", "overlap", "pipeline", "ranks"))
"""Files with tests that see more than one GPU."""
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
    """A plugin of pytest where results come together: counts outcomes by file.

    is_of_part: of a test's name, whether it is run here; others are counted only.
    """

    def __init__(self, ends_at: float, is_of_part: Callable[[str], bool]) -> None:
        self._ends_at, self._is_of_part = ends_at, is_of_part
        self._told_at: defaultdict[str, float] = defaultdict(time.monotonic)
        self._done: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()
        """Tests of each file."""
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_sessionstart(self, session: Any) -> None:
        self._reporter = session.config.pluginmanager.get_plugin("terminalreporter")

    def pytest_collection_finish(self, session: Any) -> None:
        self._collected([item.nodeid for item in session.items])
        session.items[:] = [item for item in session.items if self._is_of_part(item.nodeid)]

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


def part_of(name: str, num_cards: int) -> str:
    """Which of PARTS runs this file, or this test."""
    path = Path(file_of(name))
    if any(map(path.match, KERNELS)):
        return "kernels"
    return "engines" if num_cards == 1 or any(map(path.match, SEVERAL_GPUS)) else "engines_of_one_gpu"


def cards_seen(number: int) -> list[str]:
    """The first so many of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (seen.split(",") if seen is not None else [*map(str, range(number))])[:number]


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
    parser.add_argument("--cards", type=int, default=1, help="how many GPUs tests that need one are spread over")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # that this process runs
    options = parser.parse_args(ours)
    names, ends_at = files_from(options.files, options.first), time.monotonic() + options.seconds
    if options.part is None and max(options.processes, options.cards) > 1:
        if find_spec("xdist") is not None:
            return run_parts(names, ends_at, options, behind)
        print("pytest-xdist is not installed: one process runs all tests", flush=True)
    return run_part(names, ends_at, options, behind)


def workers(number: int, cards: list[str]) -> list[str]:
    """Arguments of pytest-xdist for so many workers, each of which sees one of the GPUs from its beginning on.

    A variable that a plugin set would come too late: files of fixtures look for GPUs before.
    """
    each = Counter(cards[index % len(cards)] for index in range(number))
    return [
        word for card, count in each.items() for word in ("--tx", f"{count}*popen//env:CUDA_VISIBLE_DEVICES={card}")
    ]


def run_parts(names: list[str], ends_at: float, options: argparse.Namespace, behind: list[str]) -> int:
    """Each part in a process that leaves nothing on the cards; where there are several, the first counts all tests."""
    files = {part: [name for name in names if part_of(name, options.cards) == part] for part in PARTS}
    parts = {part: some for part, some in files.items() if some}
    if len(parts) > 1:
        parts = {**parts, "engines": names}
    codes = list[int]()
    for part in filter(parts.__contains__, PARTS):
        seconds = ends_at - time.monotonic()
        if codes and seconds <= 0:
            codes.append(pytest.ExitCode.INTERRUPTED)
            continue
        given = {"part": part, "processes": options.processes, "cards": options.cards, "seconds": seconds}
        ours = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, __file__, *ours, *parts[part], "--", *behind]
        codes.append(subprocess.run(command, check=False).returncode)
    return next((code for code in codes if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)), min(codes))


def run_part(names: list[str], ends_at: float, options: argparse.Namespace, behind: list[str]) -> int:
    """This process's part of the files; all of them if it has none."""
    part, cards = options.part, cards_seen(options.cards)
    files = Files(ends_at, lambda name: part in (None, part_of(name, options.cards)))
    spread = {"kernels": (options.processes, "load"), "engines_of_one_gpu": (len(cards), "loadfile")}
    given = ["-q", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--rootdir={ROOT}"]
    plugins: list[Any] = [files]
    if part in spread and spread[part][0] > 1:
        processes, how = spread[part]
        chunk = ["--maxschedchunk", str(CHUNK)] if how == "load" else []
        # pytest-benchmark warns beside xdist, and warnings are errors
        given += ["--dist", how, *chunk, *workers(processes, cards), "-p", "no:benchmark", "-p", Path(__file__).stem]
    else:
        given += ["-p", "no:xdist"]
        plugins.append(TimeLimit(ends_at))
    return int(pytest.main([*names, *given, *behind], plugins=plugins))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
