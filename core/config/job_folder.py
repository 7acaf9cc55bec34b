"""The folder of a sweep's job. The sweep passes it to the job's process, whose observers write files there."""

from __future__ import annotations

import os
from pathlib import Path

JOB_FOLDER = "HOOKLINE_JOB_FOLDER"
"""The variable that a sweep sets for each job's process."""


def job_folder() -> Path | None:
    """The folder of the sweep's job that this process runs; None outside of a sweep."""
    value = os.environ.get(JOB_FOLDER)
    return Path(value) if value else None
