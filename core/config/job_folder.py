"""The folder of a sweep's job: the sweep tells its process, which tells observers where their files belong."""

from __future__ import annotations

import os
from pathlib import Path

JOB_FOLDER = "HOOKLINE_JOB_FOLDER"
"""The variable that a sweep sets for each job's process."""


def job_folder() -> Path | None:
    """The folder of the job that this process is; None if it is none."""
    value = os.environ.get(JOB_FOLDER)
    return Path(value) if value else None
