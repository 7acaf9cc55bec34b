"""The requests an engine holds, waiting and running, in order.

Waiting requests queue first come first served; a preempted one returns to the head, in order of admission. From its
admission until it ends or is preempted, a request has an entry in `table`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

from hookline.core.contracts import RequestView
from hookline.core.requests.request import Request, RequestFacade
from hookline.core.requests.running_table import RunningTable
from hookline.core.util.arrays import IntArray, every, ints


class RequestQueue:
    """Requests by id: waiting, running and ending. An ending request's last token is sampled but not yet on the host.

    compiling: requests that wait for their grammar; policies do not see them. live: all requests.
    Moving a request takes O(1).
    """

    def __init__(self, max_num_seqs: int, max_len: int) -> None:
        # Two steps may be in flight; a request that ends with the first one keeps its entry until its token arrives.
        self.table = RunningTable(2 * max_num_seqs, max_len)
        self._running_entries: IntArray | None = None
        self.live: dict[int, Request] = {}
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.running: dict[int, Request] = {}
        self.ending: dict[int, Request] = {}
        self.compiling: dict[int, Request] = {}
        self.num_waiting_tokens = 0
        """Prompt tokens of the requests that wait, for their grammar or to run."""
        self.num_preempted_waiting = 0
        """Waiting requests that were preempted."""
        self.num_steps_without_decode = 0
        """See core.contracts.SchedulerView."""

    def __len__(self) -> int:
        return len(self.live)

    def add(self, request: Request) -> None:
        """Put a new request at the tail of the queue."""
        self.live[request.id] = self.waiting[request.id] = request
        self.num_waiting_tokens += request.num_prompt_tokens

    def hold_back(self, request: Request) -> None:
        """Keep a new request out of the queue until `let_in`."""
        self.live[request.id] = self.compiling[request.id] = request
        self.num_waiting_tokens += request.num_prompt_tokens

    def let_in(self, request: Request) -> None:
        """Put a request that was held back at the tail of the queue."""
        self.waiting[request.id] = self.compiling.pop(request.id)

    def admit(self, request: Request) -> None:
        """Move a waiting request to the running ones, as the newest."""
        self.running[request.id] = self.waiting.pop(request.id)
        self._left(request)
        self.table.take(request)
        self._running_entries = None

    def end(self, request: Request) -> None:
        """Move a running request whose last token is sampled to `ending`, which policies do not see."""
        self.ending[request.id] = self.running.pop(request.id)
        self._running_entries = None

    def preempt(self, requests: Sequence[Request]) -> None:
        """Move running requests back to the head of the queue, in the order in which they were admitted."""
        order = {id_: place for place, id_ in enumerate(self.running)}
        for request in sorted(requests, key=lambda request: order[request.id], reverse=True):
            del self.running[request.id]
            self.table.leave(request)
            self.waiting[request.id] = request
            self.num_waiting_tokens += request.num_prompt_tokens
            self.num_preempted_waiting += 1
            self.waiting.move_to_end(request.id, last=False)
        self._running_entries = None

    def remove(self, request: Request) -> None:
        """Forget a request, in whatever state it is."""
        del self.live[request.id]
        if self.waiting.pop(request.id, None) or self.compiling.pop(request.id, None):
            self._left(request)
        self.running.pop(request.id, None)
        self.ending.pop(request.id, None)
        self.table.leave(request)
        self._running_entries = None

    def _left(self, request: Request) -> None:
        """Update the counts of waiting requests and tokens after this request left the queue."""
        self.num_waiting_tokens -= request.num_prompt_tokens
        self.num_preempted_waiting -= request.num_preemptions > 0

    def running_entries(self) -> IntArray:
        """Table entries of the running requests, oldest first; not to be written to."""
        if self._running_entries is None:
            self._running_entries = ints(request.entry for request in self.running.values())
        return self._running_entries

    def decoding(self) -> IntArray:
        """Table entries of the running requests that can decode, oldest first; not to be written to."""
        entries = self.running_entries()
        is_ready = self.table.can_decode(entries)
        return entries if every(is_ready) else entries[is_ready]

    def count_step(self, num_decodes: int) -> None:
        """Note, before a step changes anything, how many requests decode in it: counts steps in which none does."""
        is_without = num_decodes == 0 and len(self.decoding()) > 0
        self.num_steps_without_decode = self.num_steps_without_decode + 1 if is_without else 0

    def prefilling(self) -> list[RequestView]:
        """Views of the running requests with known tokens to compute, oldest first."""
        entries = self.running_entries()
        is_ready = self.table.can_decode(entries)
        return [] if every(is_ready) else [request.view for request in self.table.requests(entries[~is_ready])]


class Views(Sequence[RequestView]):
    """A read-only sequence of request views over a live mapping; each view is made when it is first read."""

    def __init__(self, requests: dict[int, Request]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestFacade]:
        return (request.view for request in self._requests.values())

    def __reversed__(self) -> Iterator[RequestFacade]:
        return (request.view for request in reversed(self._requests.values()))

    @overload
    def __getitem__(self, index: int) -> RequestView: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...

    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        if isinstance(index, slice):
            return list(self)[index]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        if index >= 0:
            return next(islice(iter(self), index, None))
        return next(islice(reversed(self), -index - 1, None))
