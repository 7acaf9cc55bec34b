"""Runs the jobs of a sweep, each in a process of its own: a job that fails or leaks takes nothing with it.

Knows command lines and folders; what a job does is `core.run`'s matter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from core.compose import Job
from core.errors import ConfigError
from core.prompts import SOURCES, piped_text
from core.raw_values import RAW_KEYS

RESULTS = "output.jsonl"


def run_jobs(jobs: Sequence[Job], module: str = "core.run", key: str = "output") -> int:
    """Run the jobs one after the other and return the exit code: 1 if any of them failed.

    module: what each job runs. key: the root key that names its result file, which goes to the job's own folder.
    Where jobs take prompts, piped input is read once and given to each of them.
    Raises: ConfigError if that key names a folder.
    """
    names = [_file_name(job, key) for job in jobs]
    text = piped_text() if _take_standard_input(jobs[0]) else None
    failed = 0
    for number, (job, name) in enumerate(zip(jobs, names, strict=True)):
        assert job.folder is not None
        arguments = [argument for argument in job.arguments if not argument.startswith(f"{key}=")]
        _say(f"job {number} of {len(jobs)}: {' '.join(arguments) or '(defaults)'}")
        code = _run_child(module, [*arguments, f"{key}={job.folder / name}"], text)
        if code:
            failed += 1
            _say(f"job {number} failed with exit code {code}; the others run on")
    _say(f"{len(jobs) - failed} of {len(jobs)} jobs succeeded; results are in {_parent(jobs)}")
    return 1 if failed else 0


def _run_child(module: str, arguments: Sequence[str], text: str | None) -> int:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, input=(text or "").encode(), check=False).returncode


def _file_name(job: Job, key: str) -> str:
    output = job.tree.get(key)
    if output is None:
        return RESULTS
    assert key in RAW_KEYS
    if Path(str(output)).name != str(output):
        raise ConfigError(f"{key}={output}: each job of a sweep has its own folder; give a file name alone")
    return str(output)


def _take_standard_input(job: Job) -> bool:
    # A benchmark's tree has a workload in place of prompts.
    return "workload" not in job.tree and all(job.tree.get(source) is None for source in SOURCES)


def _parent(jobs: Sequence[Job]) -> Path:
    assert jobs[0].folder is not None
    return jobs[0].folder.parent


def _say(message: str) -> None:
    print(f"hookline: {message}", file=sys.stderr, flush=True)
