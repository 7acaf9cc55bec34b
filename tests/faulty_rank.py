"""A plugin for tests: Qwen3, but one rank does something bad, as FAULTY_RANK says: RANK:FORWARD:FAULT.

Forward 0 is the constructor, T700 the first of 700 tokens; RANK "all" means every one. A plugin like any other:
HOOKLINE_PLUGINS=tests.faulty_rank.
"""

import os

from hookline.core.contracts import hookimpl
from hookline.plugins.models import Qwen3Config

API_VERSION = 2
VARIABLE = "FAULTY_RANK"


@hookimpl
def register_models(register):
    register("faulty", "tests.faulty_rank_model:FaultyQwen3", config=Qwen3Config, help="breaks off where it is told")


def fault(rank, *forward_names):
    """What this rank is to do at this forward, or None."""
    bad_rank, bad_forward, what = os.environ[VARIABLE].split(":")
    return what if bad_rank in ("all", str(rank)) and bad_forward in forward_names else None
