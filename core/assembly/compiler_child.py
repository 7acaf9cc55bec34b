"""The child process that compiles an engine's kernels.

On a machine that has compiled nothing yet it is started before this process imports torch, so that both import at the
same time, and compiling begins some seconds earlier. This module imports no torch.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from hookline.core.assembly.exported_kernels import fitting
from hookline.core.checkpoint.locate import refuse_absent
from hookline.core.config.settings import Config
from hookline.core.util.child_python import python_command
from hookline.core.util.process import num_usable_cores
from hookline.core.util.task_child import TaskChild

CHILD = "hookline.core.prebuild.child:main"
"""The child's main function. It is named and not imported, since it stands above this package."""
DRIVER = Path("/dev/nvidiactl")
"""There is a GPU that torch could use where this file is."""
LEAST_CORES = 4
"""With fewer cores the child's imports would take time from the engine's."""
STAMP = "hookline-{}.json"
"""Name of the file, in Triton's cache, which records that an engine's kernels were compiled."""

_early: list[TaskChild] = []
"""At most one child, started before its task is known."""
os.register_at_fork(after_in_child=lambda: _early.clear())  # it belongs to the process that began it


def begin_early(config: Config) -> None:
    """Begin the child now if an engine of this configuration is likely to need it.

    For commands, before they import the engine. `compiler_child` hands it to the engine; it ends with this process.
    A failure is not reported here: the engine will try again, and report it.

    Raises: CheckpointError for a missing folder, before the engine's imports, which take seconds.
    """
    refuse_absent(config.model.config.checkpoint, is_claimed=config.model.entry is not None)
    if _early or "torch" in sys.modules or not _is_likely(config):
        return
    atexit.register(end_early)
    with suppress(OSError):
        _early.append(_begun())


def _is_likely(config: Config) -> bool:
    """Whether an engine on this machine's card would have its kernels compiled in another process, for the first time.

    Whether the very kernels of this configuration are compiled is known only with torch; so: whether any are.
    """
    if not config.engine.compile_ahead or config.num_ranks > 1 or config.device == "cpu" or not DRIVER.exists():
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    kernels = config.kernels.entry
    if kernels is not None and "triton" not in kernels.needs.packages:
        return False
    if num_usable_cores() < LEAST_CORES or find_spec("triton") is None:
        return False
    folders = filter(None, (triton_cache(), fitting(config.engine.kernel_cache)))
    return not any(path for folder in folders for path in folder.glob(STAMP.format("*")))


def compiler_child() -> TaskChild:
    """The child that was begun early, or a new one; to be given its task."""
    return _early.pop() if _early else _begun()


def end_early() -> None:
    """End the child that was begun early, if there is one: the engine does not need it."""
    while _early:
        _early.pop().end()


def triton_cache() -> Path:
    """The folder where Triton keeps compiled kernels."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _begun() -> TaskChild:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # it needs no GPU, and must not
    return TaskChild(python_command(CHILD), environment)
