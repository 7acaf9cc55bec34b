"""Hookline's errors, and how their messages show values and other errors."""

from __future__ import annotations

import os
import re
import reprlib
import sys
import traceback
from collections.abc import Iterable
from math import log10

TRACEBACK_VARIABLE = "HOOKLINE_TRACEBACK"
"""Set to 1 to see where an error came from: its traceback is printed before its one line."""
_BLAME = re.compile(
    r"[a-z_]+ '[^':/\\]*' of plugin '[^':/\\]*' \([^:/\\]*\) "
    r"(?:cannot be loaded|(?:fails|breaks its contract)\b[^:/\\]*(?=: ))"
)
"""Who fails and where, as errors that blame a plugin begin; no part of it can be a path."""


class HooklineError(Exception):
    """Base of every error that a user, a checkpoint or a plugin can cause."""


class ConfigError(HooklineError):
    """A configuration key or value that cannot be used; the message names the key."""


class BrokenConfigError(ConfigError):
    """Code of a config dataclass that failed, as its cause says; it did not refuse the values by a ValueError."""


class PluginError(HooklineError):
    """A plugin that was chosen and is broken, blocked, unavailable or does not fit."""

    @property
    def blame(self) -> str | None:
        """Which plugin failed and in which method, without what it raised, whose text may hold anything; None if the
        message does not say so.
        """
        found = _BLAME.search(str(self))
        return None if found is None else found[0]


class CheckpointError(HooklineError):
    """A checkpoint that is missing, unreadable or does not match its model."""


class RequestError(HooklineError):
    """A request that cannot be served; it is refused alone and the others run on."""

    reason = "invalid"
    """The kind of refusal as one word, by which metrics count refusals."""


class PromptTooLongError(RequestError):
    """A request whose prompt is longer than any that the engine could serve."""

    reason = "prompt_too_long"


class QueueFullError(RequestError):
    """A request that is refused because too many wait already; it may be served later.

    key, limit: the configuration key that says so, and its value. num_waiting_requests, num_waiting_tokens: how many
    wait, and how many prompt tokens they have.
    """

    reason = "queue_full"

    def __init__(self, key: str, limit: int, num_waiting_requests: int, num_waiting_tokens: int) -> None:
        """Say in the message what waits, and what the limit is."""
        waiting = f"{num_waiting_requests} requests with {num_waiting_tokens} prompt tokens wait already"
        super().__init__(f"the queue is full: {waiting} and {key}={limit}; try again later")
        self.key, self.limit = key, limit
        self.num_waiting_requests, self.num_waiting_tokens = num_waiting_requests, num_waiting_tokens


class PluginFault(RequestError, PluginError):
    """A request that ends since a plugin's code failed for it: not its fault. It ends alone, and the others run on."""

    reason = "plugin_fault"


class EngineError(HooklineError):
    """An engine that failed while it had requests: every caller that waits gets this error, with the cause."""


class PlanError(PluginError):
    """A scheduler's plan that breaks a rule, before anything of it is carried out; or plans that lead nowhere."""


class CapacityError(HooklineError):
    """Memory that does not suffice; the message holds the arithmetic and the key to change."""


class LostStep(HooklineError):
    """A step that failed before any of its results was kept: its requests end, and the engine goes on with the others.

    ended: ids of the requests that it ended. ends_engine: the executor cannot compute another step, so all requests
    end.
    """

    ended: frozenset[int] = frozenset()
    ends_engine = False

    def conclude(self, outcome: str, ended: frozenset[int] = frozenset()) -> None:
        """Add what became of the engine to the message, and note which requests ended."""
        self.args, self.ended = (f"{self}. {outcome}",), ended

    def end_engine(self) -> None:
        """Note that no step can be computed after it."""
        self.ends_engine = True


class StepFault(LostStep, PluginError):
    """A plugin whose code failed in a step; the message names it, the method and the step."""


class StepCapacityError(LostStep, CapacityError):
    """Memory that did not suffice for a step."""


class RequestFault(StepFault):
    """A plugin whose code failed for some requests of a step; they alone end, and the others compute it again.

    rows: theirs in the request table. extensions: bits of the step extensions that failed, whose users they are.
    is_refusal: the plugin did not fail, but said that it cannot serve them.
    """

    def __init__(
        self, message: str, *, rows: Iterable[int] = (), extensions: int = 0, is_refusal: bool = False
    ) -> None:
        """`message` names the plugin, the method and the step, in one line."""
        super().__init__(message)
        self.rows, self.extensions, self.is_refusal = frozenset(rows), extensions, is_refusal


class RankError(HooklineError):
    """A rank of tensor parallelism that was lost; the message names it and the cause. The engine has ended."""


def ends_engine(error: BaseException) -> bool:
    """Whether no step can be computed after this error of Engine.step."""
    return isinstance(error, RankError) or (isinstance(error, LostStep) and error.ends_engine)


def requests_ended_by(error: BaseException) -> frozenset[int] | None:
    """Ids of the requests that end with this error of Engine.step; None: all that are queued, which the caller ends."""
    return error.ended if isinstance(error, LostStep) and not error.ends_engine else None


def show_traceback(error: BaseException) -> None:
    """Print an error's traceback on standard error, if HOOKLINE_TRACEBACK=1 asks for it."""
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)


class Interrupted(BaseException):
    """Raised inside code that is being interrupted. No `except Exception` catches it."""


PASSES = (KeyboardInterrupt, Interrupted)
"""Errors that a plugin's code may let through without being at fault: the user's interrupt and ours."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory did not suffice, on the host or on a GPU. Imports no torch."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # On a CPU torch raises a plain RuntimeError.
    return isinstance(error, CapacityError | MemoryError) or "DefaultCPUAllocator" in str(error)


MAX_SHOWN = 80
"""Most characters that an error shows of a value."""
MAX_LINE = 300
"""Most characters of an error that another one shows as its cause."""
MAX_TEXT = 200
"""Most characters that an error shows of a name or of another error's text."""
_MAX_SHOWN_BITS = 200
"""A longer whole number is not written out: Python refuses to above 4,300 digits, and takes long below."""


class _Short(reprlib.Repr):
    """Looks at the first items and characters alone, so that a large value costs no more than a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, MAX_SHOWN - 10, MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        """A very large number by its length."""
        bits = x.bit_length()
        return repr(x) if bits <= _MAX_SHOWN_BITS else f"<whole number of about {round(bits * log10(2))} digits>"


def shown(value: object) -> str:
    """The value as Python writes it, in one line of at most MAX_SHOWN characters."""
    try:
        text = clipped(_Short().repr(value))
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def shown_key(key: object) -> str:
    """A key as `shown` gives it, without quotes."""
    return shown(key).strip("'\"")


def clipped(text: str, limit: int = MAX_TEXT) -> str:
    """The text in one line of about `limit` characters: what cannot be printed is escaped, the middle left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(error: BaseException, limit: int | None = None) -> str:
    """`Type: message` with all white space collapsed; with a limit, at most that many characters, all printable."""
    message = str(error) if limit is None else str(error)[: 4 * limit]
    line = " ".join(f"{type(error).__name__}: {message}".split()).removesuffix(":")
    if limit is None:
        return line
    return clipped(line if len(line) <= limit else f"{line[: limit - 3]}...", limit)


def one_short_line(error: BaseException) -> str:
    """`one_line` of at most MAX_LINE characters."""
    return one_line(error, MAX_LINE)
