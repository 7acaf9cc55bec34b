"""Errors a user can cause, each with the value, the limit and the fix in one line.

`assert` is for our own bugs; everything here is for people. Every class derives from `HooklineError`, so an entry point
prints `str(error)` and exits with code 2, without a traceback unless HOOKLINE_TRACEBACK=1 asks for it.
"""

import os
import traceback

TRACEBACK_VARIABLE = "HOOKLINE_TRACEBACK"
"""Set to 1 to see where an error came from: its traceback is printed before its one line."""


class HooklineError(Exception):
    """Base of every error that a user, a checkpoint or a plugin can cause."""


class ConfigError(HooklineError):
    """A configuration key or value that cannot be used; the message names the key."""


class PluginError(HooklineError):
    """A plugin that was chosen and is broken, blocked, unavailable or does not fit."""


class CheckpointError(HooklineError):
    """A checkpoint that is missing, unreadable or does not match its model."""


class RequestError(HooklineError):
    """A request that cannot be served; it is refused alone and the others run on."""


class QueueFullError(RequestError):
    """A request that is refused because too many wait already; it may be served later.

    key, limit: the configuration key that says so, and its value. num_waiting_requests, num_waiting_tokens: how many
    wait, and how many prompt tokens they have.
    """

    def __init__(self, key: str, limit: int, num_waiting_requests: int, num_waiting_tokens: int) -> None:
        waiting = f"{num_waiting_requests} requests with {num_waiting_tokens} prompt tokens wait already"
        super().__init__(f"the queue is full: {waiting} and {key}={limit}; try again later")
        self.key, self.limit = key, limit
        self.num_waiting_requests, self.num_waiting_tokens = num_waiting_requests, num_waiting_tokens


class EngineError(HooklineError):
    """An engine that broke off while a request was in it: everybody who waits gets one, with the cause."""


class PlanError(PluginError):
    """A scheduler's plan that breaks a rule; raised before anything of the plan is carried out."""


class CapacityError(HooklineError):
    """Memory that does not suffice; the message holds the arithmetic and the key to change."""


class RankError(HooklineError):
    """A rank of tensor parallelism that was lost; the message names it and the cause. The engine has ended."""


def show_traceback(error: BaseException) -> None:
    """Print an error's traceback on standard error, if HOOKLINE_TRACEBACK=1 asks for it."""
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
