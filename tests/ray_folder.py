"""A place for Ray's files that one test module has for itself, where Ray also notes the address of its last cluster.

Without it all clusters of a machine share /tmp/ray, which a cluster with another folder does not even make.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ATTEMPTS = 3
"""To start a node, for which Ray itself allows seconds that a busy machine may not have."""


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


def cluster_of(*nodes: dict[str, Any]) -> Any:
    """A ray.cluster_utils.Cluster of these nodes, the first of which is its head."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for node in nodes:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                cluster.add_node(**node)
                break
            except Exception:
                if attempt == ATTEMPTS:
                    raise
    return cluster
