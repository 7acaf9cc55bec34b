"""Runs a command in a process of its own; its output goes to a file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.core.sweep.job_status import DONE, TIMED_OUT, cause_of_exit

TAIL_BYTES = 65536
"""Bytes at the end of a log that can contain the cause of a failure."""


def run_child(
    command: Sequence[str],
    cwd: str,
    text: str | None,
    log: Path,
    timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a command until it ends; returns its status, its error and its exit code. text: its standard input; None:
    empty. timeout_s: after which it is killed; None: never. environ: further variables.
    """
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env={**os.environ, **(environ or {})},
                input=(text or "").encode(),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"status": TIMED_OUT, "error": f"not done after job_timeout_s={timeout_s}", "exit_code": None}
    if done.returncode == 0:
        return {"status": DONE, "error": None, "exit_code": 0}
    return {**cause_of_exit(done.returncode, _tail(log)), "exit_code": done.returncode}


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
