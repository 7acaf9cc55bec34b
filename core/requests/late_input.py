"""What draws of a step wait for, as it follows from the tokens of the step before: the host's half of a late input.

A step with such draws is launched as far as its hidden states. Once the tokens before are known, a row of words is
written for each late draw, and the ranks draw by these rows (core/worker/runner/late_rows.py). A request has at most
one late input, and so has an engine. Legend: N late draws, W int32 words of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hookline.core.errors import RequestError
from hookline.core.outputs import FinishReason
from hookline.core.request_options import NO_TAGS
from hookline.core.util.arrays import WordArray


class LateState(Protocol):
    """How far one request is.

    field: of SamplingParams, which asks for it. fault: why the request has to end. end: the reason, once it is known
    that the request ends with its last token; nothing is drawn for it then. can_go_back: whether it may have drafts.
    """

    field: str
    fault: RequestError | None
    end: FinishReason | None
    can_go_back: bool

    def stop(self, reason: FinishReason = FinishReason.STOP) -> None:
        """Note that the request ends with its last token, whatever the rows say."""
        ...


class LateInput(Protocol):
    """Writes the late rows of one engine. Its states are of its own kind; an error ends its request alone."""

    def open(self, id_: int, state: Any, tags: Mapping[str, str] = NO_TAGS) -> bool:
        """Begin with a new request, or begin to make ready what it needs; returns False if the request has to wait.

        tags: of the request.
        Raises: RequestError if it cannot be served.
        """
        ...

    def opened(self, *, is_idle: bool = False) -> Iterator[tuple[int, RequestError | None]]:
        """Requests that need wait no longer, with None, or with the error that ends the request.

        is_idle: whether to wait a little for one, since there is nothing else to do.
        """
        ...

    def forget(self, id_: int) -> None:
        """Stop making ready what a request waits for, since it ended."""
        ...

    def take(self, state: Any, token_id: int) -> None:
        """Advance a request by the token that was drawn; `end` then says why it ends with it, None if it goes on."""
        ...

    def num_fitting(self, state: Any, drafts: Sequence[int]) -> int:
        """How many drafts may be drawn, one after the other, and do not end the request."""
        ...

    def write(self, waiting: Sequence[tuple[Any, Sequence[int]]], rows_NW: WordArray) -> bool:
        """Write the rows of requests: of each the one for its next draw, and those behind its drafts, if it has any.

        waiting: states with their drafts; None for a request that has ended. Returns whether any has a fault now.
        """
        ...

    def close(self) -> None:
        """Release what it holds; nothing can be opened any more."""
        ...
