"""Messages between front ends and the engine's process: MessagePack, one message per step and front end.

Plain arrays of plain values, checked against these types when they are read; nothing is pickled. A completion has a
`handle`, a number that its front end gave it and never gives again; the n completions of a prompt have n in a row.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

from hookline.core.errors import (
    EngineError,
    HooklineError,
    PluginFault,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    one_short_line,
)
from hookline.core.outputs import FinishReason, RequestOutput, Timings, TokenLogprob
from hookline.core.util.arrays import IntArray

Scored: TypeAlias = tuple[int, float, tuple[tuple[int, float], ...]]
"""A TokenLogprob."""


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of all: an array whose first item is the type's name."""


class Hello(Message, frozen=True, gc=False):
    """First message of a front end. Answered by LoadReport."""


class Submit(Message, frozen=True, gc=False):
    """Queue a prompt. params: the fields of SamplingParams that are not their defaults. arrival_s: time.monotonic's.

    options: the fields of RequestOptions that are given. pooling: the fields of PoolingParams, of a prompt that is
    pooled.
    """

    handle: int
    token_ids: bytes
    params: dict[str, Any]
    options: dict[str, Any]
    arrival_s: float
    pooling: dict[str, Any] | None = None


class Cancel(Message, frozen=True, gc=False):
    """End these completions without an answer."""

    handles: list[int]


class Finish(Message, frozen=True, gc=False):
    """End these completions, in whose text a stop string was found. Answered by their ends."""

    handles: list[int]


class TurnedAway(Message, frozen=True, gc=False):
    """How many prompts a front end refused since too many requests are open; for the engine's observers."""

    count: int


class Gone(Message, frozen=True, gc=False):
    """From the supervisor: a front end has ended; so do its completions."""

    name: str


class Stop(Message, frozen=True, gc=False):
    """From the supervisor: end everything in good order."""


class AskMetrics(Message, frozen=True, gc=False):
    """Answered by Metrics with the same number."""

    number: int


class Metrics(Message, frozen=True, gc=False):
    """Metrics in Prometheus' text format."""

    number: int
    text: str


class Refused(Message, frozen=True, gc=False):
    """A prompt that is not served, or not to its end.

    error: the name of the error's class; queue: QueueFullError's arguments.
    """

    handle: int
    message: str
    error: str
    queue: tuple[str, int, int, int] | None = None


class End(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The end of a completion, whose tokens have been sent. timings: four times in seconds. vector: float32 bytes."""

    handle: int
    reason: str
    stop_reason: int | None
    num_cached_tokens: int
    num_preemptions: int
    error: str | None
    timings: tuple[float, float | None, float | None, float] | None
    prompt_logprobs: list[Scored | None] | None = None
    vector: bytes | None = None
    is_fault: bool = False


class StepNews(Message, frozen=True, gc=False):
    """A step's results for the completions of one front end.

    handles, token_ids: int64 each; token i belongs to completion handles[i]. last: the finish reason of each
    completion whose last token is among them. scored: the tokens' log-probabilities, for completions that asked for
    them. ends: the completions that have ended. told: values of step extensions for the tokens, as Delta.extensions,
    for completions that use an extension.
    """

    handles: bytes
    token_ids: bytes
    last: dict[int, str]
    scored: dict[int, list[Scored]]
    ends: list[End]
    told: dict[int, dict[str, list[Any]]] = {}


class LoadReport(Message, frozen=True, gc=False):
    """The fields of engine_client.EngineLoad."""

    values: tuple[int, int, int, int, float, float]


class Broken(Message, frozen=True, gc=False):
    """The engine is dead: all completions end with this error, and it serves nothing more."""

    reason: str


ToEngine = Hello | Submit | Cancel | Finish | TurnedAway | Gone | Stop | AskMetrics
FromEngine = StepNews | Refused | LoadReport | Metrics | Broken

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def packed(ids: Any) -> bytes:
    """Token ids or handles as bytes.

    Raises: ValueError, TypeError or OverflowError if a number is no int64.
    """
    array = np.asarray(ids)
    if len(array) and array.dtype.kind not in "iu":
        raise TypeError("token ids must be whole numbers")
    return array.astype(np.int64).tobytes()


def unpacked(data: bytes) -> IntArray:
    """The token ids or handles that `packed` was given, (count,) int64."""
    return np.frombuffer(data, dtype=np.int64)


def unpacked_list(data: bytes) -> list[int]:
    """As `unpacked`, but a list; a third of the time for the few numbers of a step."""
    return memoryview(data).cast("q").tolist()


def scored(one: TokenLogprob) -> Scored:
    """A TokenLogprob as it is sent."""
    return (one.token_id, one.logprob, one.top)


def end_of(handle: int, output: RequestOutput) -> End:
    """The end of a completion as it is sent."""
    times = output.timings
    prompt = output.prompt_logprobs
    return End(
        handle,
        output.finish_reason.value,
        output.stop_reason if isinstance(output.stop_reason, int) else None,
        output.num_cached_tokens,
        output.num_preemptions,
        output.error,
        None if times is None else (times.arrival_s, times.scheduled_s, times.first_token_s, times.finished_s),
        None if prompt is None else [None if one is None else scored(one) for one in prompt],
        None if output.vector is None else output.vector.tobytes(),
        output.is_fault,
    )


def output_of(end: End, prompt: str | None, prompt_ids: list[int], token_ids: list[int], index: int) -> RequestOutput:
    """The RequestOutput of a completion whose `End` came; the caller adds text and log-probabilities."""
    prompt_logprobs = end.prompt_logprobs
    return RequestOutput(
        end.handle,
        prompt,
        prompt_ids,
        token_ids,
        FinishReason(end.reason),
        num_cached_tokens=end.num_cached_tokens,
        num_preemptions=end.num_preemptions,
        error=end.error,
        stop_reason=end.stop_reason,
        timings=None if end.timings is None else Timings(*end.timings),
        prompt_logprobs=None
        if prompt_logprobs is None
        else [None if one is None else TokenLogprob(*one) for one in prompt_logprobs],
        index=index,
        vector=None if end.vector is None else np.frombuffer(end.vector, dtype=np.float32),
        is_fault=end.is_fault,
    )


_SENT = (PromptTooLongError, PluginFault, RequestError)
"""Errors that keep their class across processes: an error is sent under the name of the first class that it is of."""


def refusal_of(handle: int, error: BaseException) -> Refused:
    """The error of a prompt that is not served, as it is sent."""
    if isinstance(error, QueueFullError):
        counts = error.num_waiting_requests, error.num_waiting_tokens
        return Refused(handle, str(error), QueueFullError.__name__, (error.key, error.limit, *counts))
    for kind in _SENT:
        if isinstance(error, kind):
            return Refused(handle, str(error), kind.__name__)
    return Refused(handle, one_short_line(error), EngineError.__name__)


def error_of(refused: Refused) -> HooklineError:
    """The error that was sent; an EngineError if its class is not in _SENT."""
    if refused.queue is not None:
        return QueueFullError(*refused.queue)
    kind = next((one for one in _SENT if one.__name__ == refused.error), EngineError)
    return kind(refused.message)
