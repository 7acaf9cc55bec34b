"""The child process of an engine's start that compiles kernels: it reads a line, its task, and ends with the result.

Before that it prints a line for each kernel that it is done with, see `core.assembly.kernel_build.progress_line`.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict

from hookline.core.util.process import num_usable_cores

MOST_PROCESSES = 16


def main() -> int:
    """Compile the kernels of the task on standard input, if one comes; prints one JSON object.

    All that a task may need is imported before it is read. An engine waits for this process, which lives for seconds,
    so garbage is not collected, and not at exit either.
    """
    gc.disable()
    from hookline.core.assembly.exported_kernels import use_exported
    from hookline.core.assembly.kernel_build import progress_line
    from hookline.core.config.settings import validate
    from hookline.core.plugin.host import PluginHost
    from hookline.core.prebuild import dry_run  # noqa: F401  which imports what an engine does
    from hookline.core.prebuild.build import Outcome, build
    from hookline.core.prebuild.pretended import Card

    host = PluginHost.load()
    line = sys.stdin.readline()
    if not line:
        return 0
    task = json.loads(line)
    host.check_same(task["plugins"], "the process that compiles kernels")
    config = validate(task["config"], host)
    use_exported(config.engine.kernel_cache)
    card = task["card"]
    card = Card(tuple(card["compute_capability"]), card["num_sms"], card["shared_memory_bytes"])

    def _told(key: str, outcome: Outcome) -> None:
        sys.stdout.write(progress_line(key, outcome.variant) + "\n")
        sys.stdout.flush()

    print(json.dumps(asdict(build(config, host, card, num_processes(), _told))))
    gc.freeze()
    return 0


def num_processes() -> int:
    """How many processes compile: one for each core that this process may use, but at most MOST_PROCESSES."""
    return min(MOST_PROCESSES, num_usable_cores())
