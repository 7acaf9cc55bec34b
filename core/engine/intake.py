"""Takes requests in: checks them, gives them ids, and queues them, those with a grammar once it is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookline.core.engine.endings import Endings
from hookline.core.engine.listeners import Listeners
from hookline.core.engine.times import Times
from hookline.core.errors import PluginError, RequestError
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.request_info import RequestInfo
from hookline.core.requests.admission import EngineLimits, admit, checked_timeout_s
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.structured_output import HeldUp, StructuredOutput
from hookline.core.sampling_params import SamplingParams


class Intake:
    """Takes in the requests of one engine. structured_output: None refuses requests for structured outputs."""

    def __init__(
        self,
        limits: EngineLimits,
        queue: RequestQueue,
        endings: Endings,
        listeners: Listeners,
        structured_output: StructuredOutput | None,
        times: Times,
    ) -> None:
        self.limits = limits
        self._queue, self._endings, self._listeners = queue, endings, listeners
        self._structured_output, self._times = structured_output, times
        self._next_id = 0

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        said: Mapping[str, Any],
        *,
        timeout_s: float | None,
        arrival_s: float | None,
        like: int | None,
        **options: Any,
    ) -> int:
        """See Engine.add. said: what the request says of itself, by INFO_KEYS. options: of `admit`."""
        timeout_s = checked_timeout_s(timeout_s)
        arrival_s = self._times.now() if arrival_s is None else arrival_s
        other = None if like is None else self._queue.live[like]
        info = RequestInfo.validated(**said, tag_keys=self.limits.tag_keys) if other is None else other.info
        options |= {"info": info, "arrival_s": arrival_s, "like": other}
        request = admit(self.limits, self._next_id, prompt_token_ids, params, **options)
        self._next_id += 1
        self._enqueue(request)
        if self._listeners.hears_begin:
            self._listeners.notify("on_request_begin", info=request.begin())
        if timeout_s is not None:
            self._endings.time_limits.add(arrival_s, request.id, timeout_s, self._queue.live)
        return request.id

    def _enqueue(self, request: Request) -> None:
        """Put a new request into the queue, or hold it back until its grammar is compiled."""
        if request.constraint is None:
            self._queue.add(request)
            return
        if self._structured_output is None:
            raise RequestError("sampling.structured_outputs: this engine has no grammar back end")
        if self._structured_output.open(request.id, request.constraint):
            self._queue.add(request)
        else:
            self._queue.hold_back(request)

    def let_in_compiled(self, *, is_in_flight: bool) -> None:
        """Queue the requests whose grammars are compiled, and end those whose grammars could not be compiled.

        Those that no thread was free for end as the engine's doing, and not as refused.
        """
        assert self._structured_output is not None
        is_idle = len(self._queue.compiling) == len(self._queue) and not is_in_flight
        refused = []
        for id_, error in self._structured_output.opened(is_idle=is_idle):
            request = self._queue.compiling.get(id_)
            if request is not None and error:
                reason = FinishReason.ABORT if isinstance(error, HeldUp) else FinishReason.ERROR
                refused.append(self._endings.end(request, reason, error))
            elif request is not None:
                self._queue.let_in(request)
        self._endings.kept += refused
        self._listeners.notify_ends(refused)

    def refuse(
        self, prompt_token_ids: Sequence[int], error: RequestError, prompt: str | None, said: Mapping[str, Any]
    ) -> RequestOutput:
        """See Engine.refuse."""
        info = RequestInfo.of_valid(said, self.limits.tag_keys)
        output = RequestOutput(
            self._next_id,
            prompt,
            list(prompt_token_ids),
            [],
            FinishReason.ERROR,
            error=str(error),
            tags=dict(info.tags),
            priority=info.priority,
            deadline_s=info.deadline_s,
            refusal=error.reason,
            is_fault=isinstance(error, PluginError),
        )
        self._next_id += 1
        self._listeners.notify("on_request_end", output=output)
        return output
