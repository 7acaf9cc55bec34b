"""A plugin for tests: an option of each kind, all named "faulty", one of whose methods raises.

FAULTY_EXIT says where and what: PLACE:ERROR, or PLACE:ERROR:RANK for one rank alone. A plugin like any other:
HOOKLINE_PLUGINS=tests.faulty_exit.
"""

import asyncio
import os
import sys
from dataclasses import dataclass

from hookline.core.contracts import hookimpl
from hookline.plugins.models import Qwen3Config

API_VERSION = 2
VARIABLE = "FAULTY_EXIT"
RANK_0 = "FAULTY_RANK_0"
"""The pid of rank 0, for those who are not told their rank."""


class Own(BaseException):
    pass


ERRORS = {
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
    "Own": Own,
    "ValueError": ValueError,
    "KeyboardInterrupt": KeyboardInterrupt,
}


def act(place, rank=None):
    """Raise, if this is the place."""
    where, _, what = os.environ.get(VARIABLE, "").partition(":")
    what, _, only = what.partition(":")
    if where != place or (only and rank is not None and only != str(rank)):
        return
    if what == "exit":
        sys.exit(0)
    if what == "_exit":
        os._exit(0)
    raise ERRORS[what]("on purpose")


def this_rank():
    return 0 if os.environ.get(RANK_0) == str(os.getpid()) else 1


act("import")


@dataclass
class SchedulerConfig:
    wait_ms: float = 1.0

    def __post_init__(self):
        if self.wait_ms != 1.0:  # a plugin whose defaults raise is not loaded
            act("scheduler.config")


@dataclass
class ProcessorArguments:
    amount: float = 0.0

    def __post_init__(self):
        if self.amount:
            act("processor.config")


HERE = "tests.faulty_exit_options"


@hookimpl
def register_schedulers(register):
    act("register")
    register("faulty", f"{HERE}:Scheduler", config=SchedulerConfig)
    register("unloadable", "tests.faulty_exit_module:Nothing", config=SchedulerConfig)


@hookimpl
def register_samplers(register):
    register("faulty", f"{HERE}:Sampler")


@hookimpl
def register_models(register):
    register("faulty", f"{HERE}:Model", config=Qwen3Config)


@hookimpl
def register_kernels(register):
    register("faulty", f"{HERE}:Kernels", priority=-1)


@hookimpl
def register_processors(register):
    register("faulty", f"{HERE}:Processor", config=ProcessorArguments)


@hookimpl
def register_observers(register):
    register("faulty", f"{HERE}:Observer")
