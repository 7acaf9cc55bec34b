"""Runs of tools, each in a process of its own, one after the other until a budget of seconds is spent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
SECONDS_LEFT = "SECONDS_LEFT"
"""Stands in a command for the seconds that are left when it begins, less some to end in order."""
RESULT = "RESULT "
"""May stand before a line of JSON."""


@dataclass
class Job:
    """One run of a tool, and what came of it. label: which of a check's variants it is about."""

    label: str
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = ROOT
    """Of the tree whose tool it is."""
    status: str = "left"
    """left (not begun), done, failed, or out of time."""
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The objects among the lines that are JSON."""
        found = []
        for line in self.lines:
            if line.removeprefix(RESULT).startswith("{"):
                try:
                    found.append(json.loads(line.removeprefix(RESULT)))
                except ValueError:  # of a process that was ended while it wrote
                    continue
        return found

    def record(self, key: str) -> dict[str, Any]:
        """The first record that has this key; {} if there is none."""
        return next((one for one in self.records if key in one), {})


def run_job(job: Job, seconds: float, log: TextIO) -> None:
    """Run a job in a process of its own, for so many seconds at most; its children end with it."""
    command = [sys.executable, *(str(int(0.9 * seconds)) if one == SECONDS_LEFT else one for one in job.command)]
    process = subprocess.Popen(
        command, cwd=job.root, env={**os.environ, "PYTHONUNBUFFERED": "1", **job.environ}, process_group=0,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            job.lines.append(line.rstrip("\n"))
            log.write(line)

    reader = Thread(target=read, daemon=True)
    reader.start()
    try:
        job.status = "done" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        job.status = "out of time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5)
        if process.stdout is not None and not reader.is_alive():  # else somebody outside of the group holds it
            process.stdout.close()


def run_jobs(jobs: Sequence[Job], budget_s: float, log: TextIO, run: Callable[[Job, float, TextIO], None]) -> None:
    """Run them in their order until the budget is spent."""
    ends_at = time.monotonic() + budget_s
    for job in jobs:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            continue
        log.write(f"$ {' '.join(job.command)}\n")
        begun = time.monotonic()
        run(job, left_s, log)
        job.seconds = round(time.monotonic() - begun, 1)
        print(f"{job.label}: {Path(job.command[0]).name} {job.status} after {job.seconds} s", flush=True)
        if job.status != "done":
            print(*(f"    {line[:300]}" for line in job.lines[-12:]), sep="\n", flush=True)
