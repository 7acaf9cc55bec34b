"""The child process of an engine's start that compiles kernels: its argument is a task, its last line the result.

Before that it prints a line for each kernel that it is done with, see `core.assembly.kernel_build.progress_line`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict

MOST_PROCESSES = 16


def main() -> int:
    """Compile the kernels of the task in the only argument; prints one JSON object.

    An engine waits for it and it lives for seconds, so garbage is not collected, and not at exit either.
    """
    gc.disable()
    task = json.loads(sys.argv[1])
    from hookline.core.assembly.kernel_build import progress_line
    from hookline.core.config.settings import validate
    from hookline.core.plugin.host import PluginHost
    from hookline.core.prebuild.build import Outcome, build
    from hookline.core.prebuild.pretended import Card

    host = PluginHost.load()
    host.check_same(task["plugins"], "the process that compiles kernels")
    config = validate(task["config"], host)
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, cores))
