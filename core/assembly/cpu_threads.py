"""How many CPU threads compute: torch has one number for the whole process, by default all cores.

A small model takes longer to synchronise many threads than to compute, all the more if other processes use the cores.
"""

from __future__ import annotations

import logging
import os

import torch

from hookline.core.assembly.resolve import ResolvedConfig

SMALL_HIDDEN_SIZE = 1024
"""Models below this hidden size compute on one thread: their matrices are too small to be worth splitting."""
_log = logging.getLogger("hookline")


def num_cpu_threads(resolved: ResolvedConfig, *, is_command: bool) -> int | None:
    """Threads of all ranks together; None leaves torch's number as it is. engine.cpu_threads states the rule.

    is_command: whether the process is one of our commands, in which no other code has set the number.
    """
    asked, num_ranks = resolved.config.engine.cpu_threads, resolved.ranks.num_all
    if resolved.device.type != "cpu":
        return None
    if asked is not None or not is_command:
        return asked
    now = torch.get_num_threads()
    is_small = resolved.spec.hidden_size < SMALL_HIDDEN_SIZE and "OMP_NUM_THREADS" not in os.environ
    if not is_small or now <= num_ranks:
        return now
    _log.info("computing on %d of %d CPU threads, as the model is small; engine.cpu_threads=N sets N", num_ranks, now)
    return num_ranks
