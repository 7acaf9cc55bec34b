"""The host's half of a late input, e.g. a grammar's masks: data for draws that depend on the tokens of the last step.

A step with such draws is launched up to its hidden states. Once the tokens of the step before are known, the host
writes a row of words for each late draw, and the ranks sample with these rows (core/worker/runner/late_rows.py). A
request has at most one late input, and so has an engine. Legend: N late draws, W int32 words of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hookline.core.errors import RequestError
from hookline.core.outputs import FinishReason
from hookline.core.request_options import NO_TAGS
from hookline.core.util.arrays import WordArray


class HeldUp(RequestError):
    """A late input could not be made ready for a request, since others held it up; the request may be served later."""


class LateState(Protocol):
    """The state of one request in a late input.

    field: the field of SamplingParams that asks for it. needs: what the engine must have for it, for errors. fault:
    why the request has to end. end: the finish reason, once the request is known to end with its last token; no
    token is sampled for it then. can_go_back: whether it can take tokens back, so that a step may compute several.
    """

    field: str
    needs: str
    fault: RequestError | None
    end: FinishReason | None
    can_go_back: bool

    def stop(self, reason: FinishReason = FinishReason.STOP) -> None:
        """Note that the request ends with its last token, whatever the rows say."""
        ...


class LateInput(Protocol):
    """Writes the late rows of one engine. It defines the class of its states; an error ends its request alone."""

    def open(self, id_: int, state: Any, tags: Mapping[str, str] = NO_TAGS) -> bool:
        """Begin a new request; returns False if the request has to wait, e.g. for its grammar to be compiled.

        tags: of the request.
        Raises: RequestError if it cannot be served.
        """
        ...

    def opened(self, *, is_idle: bool = False) -> Iterator[tuple[int, RequestError | None]]:
        """Ids of requests that need not wait any longer, with None, or with the error that ends the request.

        is_idle: whether to wait a little for such a request, since the engine has nothing else to do.
        """
        ...

    def forget(self, id_: int) -> None:
        """Stop the preparation for a waiting request that ended."""
        ...

    def take(self, state: Any, token_id: int) -> None:
        """Advance a request by its sampled token; `end` is then the reason why it ends with it, None if it goes on."""
        ...

    def num_fitting(self, state: Any, tokens: Sequence[int]) -> int:
        """The number of leading tokens that may be sampled one after the other without ending the request."""
        ...

    def write(self, waiting: Sequence[tuple[Any, Sequence[int]]], rows_NW: WordArray) -> bool:
        """Write the rows of requests: for each its next draw, then the draws that follow further tokens, if any do.

        waiting: states with these tokens; None for a request that has ended. Returns whether a state has a fault now.
        """
        ...

    def close(self) -> None:
        """Release all memory and threads; no further request can be opened."""
        ...
