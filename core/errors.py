"""Errors a user can cause, each with the value, the limit and the fix in one line.

`assert` is for our own bugs; everything here is for people. Every class derives from `HooklineError`, so an entry point
prints `str(error)` and exits with code 2, without a traceback.
"""


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


class PlanError(HooklineError):
    """A scheduler's plan that breaks a rule; raised before anything of the plan is carried out."""


class CapacityError(HooklineError):
    """Memory that does not suffice; the message holds the arithmetic and the key to change."""
