"""The status of a finished job and its cause in one line, for the job's record.

Statuses: done; failed; out_of_memory; killed, by a signal from outside; timed_out. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from hookline.core.errors import HooklineError, is_out_of_memory
from hookline.core.util.process import ending_of

DONE, FAILED, OUT_OF_MEMORY, KILLED, TIMED_OUT = "done", "failed", "out_of_memory", "killed", "timed_out"
ERROR_MARK = "hookline: error: "


def failure(error: BaseException) -> dict[str, Any]:
    """Status and cause of an exception."""
    text = " ".join(str(error).split()) or "no message"
    if is_out_of_memory(error):
        return {"status": OUT_OF_MEMORY, "error": text}
    ours = isinstance(error, HooklineError)
    return {"status": FAILED, "error": text if ours else f"{type(error).__name__}: {text}"}


def cause_of_exit(exit_code: int, log: str) -> dict[str, Any]:
    """Status and cause of a process that left no record, from its exit code and what it printed."""
    if exit_code < 0:
        return {"status": KILLED, "error": ending_of(exit_code).removeprefix("was ")}
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [line.removeprefix(ERROR_MARK) for line in lines if line.startswith(ERROR_MARK)]
    cause = ours[-1] if ours else lines[-1] if lines else "it printed nothing"
    return {"status": FAILED, "error": f"exit code {exit_code}: {cause}" if not ours else cause}
