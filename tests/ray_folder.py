"""A place for Ray's files that one test module has for itself, where Ray also notes the address of its last cluster.

Without it all clusters of a machine share /tmp/ray, which a cluster with another folder does not even make.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def ray_folder() -> Iterator[pytest.MonkeyPatch]:
    """Ray's folder while it lasts, also for child processes; what else is patched is undone with it."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # names of Ray's sockets are long
    (folder / "ray").mkdir()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", str(folder))
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            patch.setenv("RAY_agent_register_timeout_ms", "120000")
            yield patch
    finally:
        shutil.rmtree(folder, ignore_errors=True)
