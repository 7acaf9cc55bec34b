"""A request on the host: its tokens, its blocks, and how far it got.

Token ids live in one preallocated int32 array, so a prompt chunk or a block's content is a slice and never a
conversion. The counts that change with each step live in an array too, which `core.requests.running_table` keeps beside
the counts of the other requests while the request runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Protocol

import numpy as np

from hookline.core.contracts import RequestBegin
from hookline.core.errors import HooklineError
from hookline.core.outputs import FinishReason, RequestOutput, Timings
from hookline.core.request_options import NO_TAGS, PLAIN, RequestOptions
from hookline.core.requests.extension_states import ExtensionStates
from hookline.core.requests.late_input import LateState
from hookline.core.requests.prompt_readers import ChunkRead, PromptReader
from hookline.core.requests.scores import DRAW_SCORES, PromptScores, Scores
from hookline.core.requests.step_extensions import NOTHING, Prepared
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.arrays import Array, IntArray, TokenArray, VectorArray, ints


@lru_cache(maxsize=64)
def ascending(ids: frozenset[int]) -> IntArray:
    """Token ids in an array, in ascending order; not to be written to, as requests share it."""
    return np.sort(ints(ids))


class _Count:
    """An attribute of a request that lives in its counts, under the attribute's name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.place = _counts_of(owner).index(name)

    def __get__(self, request: Request, owner: type | None = None) -> int:
        value: int = request.counts.item(self.place)
        return value

    def __set__(self, request: Request, value: int) -> None:
        request.counts[self.place] = value


def _counts_of(owner: type) -> tuple[str, ...]:
    """The id, which never changes and is read elsewhere, and each attribute that is a _Count, in their order."""
    return ("id", *(name for name, attribute in vars(owner).items() if isinstance(attribute, _Count)))


class Watcher(Protocol):
    """Follows the tokens of one request, and may end it. Requests without a watcher cost nothing here."""

    def see(self, token_id: int, reason: FinishReason | None) -> str | None:
        """Called with every token once it is known, and with the reason if it is the last one.

        Returns the stop string that ends the request with this token, or None. Must not raise.
        """
        ...


class Request:
    """A request in the engine. Counts are tokens unless they say otherwise.

    counts: the numbers that steps advance, see COUNTS. entry: index of its counts in the running table while the
    request runs, else -1.
    """

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "block_size",
        "blocks",
        "counts",
        "deadline_s",
        "entry",
        "extensions",
        "fault",
        "first_token_s",
        "group_blocks",
        "id",
        "late",
        "match",
        "max_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "options",
        "params",
        "parent_serial",
        "prefix_root",
        "prepared",
        "priority",
        "prompt",
        "reader",
        "scheduled_s",
        "scores",
        "seed",
        "stop_ids",
        "stop_string",
        "stops_X",
        "tags",
        "temperature",
        "tokens",
        "view",
        "watcher",
    )

    row = _Count()
    """Row of the request table on the device; -1 without one."""
    num_tokens = _Count()
    """Tokens of prompt and completion; a token is counted once the step that draws it is launched."""
    num_known_tokens = _Count()
    """Tokens of prompt and completion that are known on the host."""
    num_computed_tokens = _Count()
    prefill_target = _Count()
    """How many of the known tokens must be computed before the request can decode."""
    high_water = _Count()
    """Most tokens this request ever had computed."""
    num_block_tokens = _Count()
    """Tokens that the request's blocks have room for."""
    num_cached_block_tokens = _Count()
    """Tokens in the blocks that other requests can find in the prefix cache."""
    min_len = _Count()
    """Length from which on a stop token may be sampled; 0 if stop tokens are always allowed."""
    max_len = _Count()
    """Length at which the request ends."""
    is_greedy = _Count()
    is_watched = _Count()
    """Whether a watcher, or extensions that follow tokens, must see its tokens one by one."""
    last_token_us = _Count()
    """When its latest token was known, in microseconds on the engine's clock; 0 before the first one. Kept only
    while an observer asks for the gaps between tokens."""
    is_late = _Count()
    """Whether its draws wait for a late input."""

    def __init__(
        self,
        id: int,
        prompt_token_ids: TokenArray,
        params: SamplingParams,
        *,
        max_tokens: int,
        block_size: int,
        seed: int,
        stop_ids: frozenset[int] = frozenset(),
        prepared: Prepared = NOTHING,
        extensions: ExtensionStates | None = None,
        prompt: str | None = None,
        arrival_s: float = 0.0,
        options: RequestOptions = PLAIN,
        watcher: Watcher | None = None,
        reader: PromptReader | None = None,
        late: LateState | None = None,
    ) -> None:
        self.counts: IntArray = np.zeros(len(COUNTS), dtype=np.int64)
        self.entry = -1
        self.counts[COUNTS.index("id")] = self.id = id  # it never changes, and steps ask for it often
        self.prompt = prompt
        self.params = params
        self.arrival_s = arrival_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.options = options
        self.priority, self.tags = options.priority, options.tags or NO_TAGS
        self.deadline_s = None if options.deadline_s is None else arrival_s + options.deadline_s
        """When it should be done, on the engine's clock."""
        self.prefix_root = prepared.prefix_root(options.prefix_root, id)
        self.watcher = watcher
        self.stop_string: str | None = None
        self.seed = seed
        self.stop_ids = stop_ids
        self.stops_X = ascending(stop_ids)
        """The stop ids in an array, in ascending order."""
        self.temperature: float = 1.0 if params.temperature is None else params.temperature
        self.prepared = prepared
        self.extensions = extensions
        if params.prompt_logprobs is not None:
            reader = PromptScores(params.prompt_logprobs, len(prompt_token_ids))
        self.reader = reader
        """Reads the hidden states of its prompt, for pooling or prompt logprobs; None without a reader."""
        self.fault: HooklineError | None = None
        """Why it ends with an error."""
        self.scores = None if params.logprobs is None else Scores(params.logprobs)
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.num_prompt_tokens = self.num_tokens = self.num_known_tokens = len(prompt_token_ids)
        self.min_len = self.num_prompt_tokens + min(params.min_tokens, max_tokens) if stop_ids else 0
        self.max_len = self.num_prompt_tokens + max_tokens
        self.is_greedy = self.temperature == 0
        self.late = late
        self.is_late = late is not None
        self.is_watched = watcher is not None or (extensions is not None and extensions.is_following)
        self.tokens: TokenArray = np.empty(self.max_len, dtype=np.int32)
        self.tokens[: self.num_prompt_tokens] = prompt_token_ids
        self.block_hashes: list[int] = []
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.match: tuple[int, list[list[int]]] = (-1, [])
        """(pool version, blocks found): the last prefix look-up, valid while the version stands."""
        self.view = RequestFacade(self)
        self.reset()

    def reset(self) -> None:
        """Forget blocks and progress, as before the first step: on arrival and when preempted."""
        self.blocks: list[int] = []
        self.group_blocks: list[list[int]] = []
        """The blocks of each group of layers; `blocks` is the first list. Empty before the first blocks."""
        self.row = -1
        self.num_computed_tokens = 0
        self.num_block_tokens = 0
        self.num_cached_block_tokens = 0
        self.prefill_target = self.num_tokens
        self.parent_serial = self.prefix_root

    def enter_row(self, row: int, now_s: float) -> None:
        """Note its row of the request table; the first time, also how many tokens it found in the prefix cache."""
        self.row = row
        if self.num_preemptions == 0:
            self.num_cached_tokens = self.num_computed_tokens
            self.scheduled_s = now_s

    def leave_row(self) -> None:
        """Note that it has no row of the request table any more."""
        self.row = -1

    def preempt(self) -> None:
        """Start from the beginning: its blocks were given back; its tokens are kept."""
        self.num_preemptions += 1
        self.reset()

    def count_computed(self, num_tokens: int) -> int:
        """Count its next tokens as computed; returns how many of them were never computed before."""
        start, mark = self.num_computed_tokens, self.high_water
        self.num_computed_tokens = end = start + num_tokens
        self.high_water = max(end, mark)
        return max(0, end - max(start, mark))

    def note_first_token(self, now_s: float) -> None:
        """Note when its first token was known."""
        self.first_token_s = now_s

    def drop_last_token(self) -> None:
        """Remove the newest token from its answer."""
        self.num_known_tokens -= 1
        if self.scores is not None:
            self.scores.drop_last()
        if self.extensions is not None:
            self.extensions.drop_last(self.num_known_outputs)

    def stop_at(self, text: str) -> None:
        """Note the stop string that its answer ends with."""
        self.stop_string = text

    def fail(self, fault: HooklineError) -> None:
        """Note why it finishes with an error."""
        self.fault = fault

    def keep_extra(self, name: str, values_X: Array) -> None:
        """Keep the numbers of this name (see StepResult.extras) of its next token; none if it did not ask for them."""
        if name == DRAW_SCORES:
            if self.scores is not None:
                self.scores.add(values_X)
        elif self.extensions is not None:
            self.extensions.add_result(name, values_X)

    def show_extensions(self, token_id: int) -> str | None:
        """Show its extensions a token; see ExtensionStates.see."""
        assert self.extensions is not None
        return self.extensions.see(token_id, None if self.scores is None else self.scores.last_logprob)

    def keep_read(self, chunk: ChunkRead, rows: VectorArray) -> None:
        """Pass the rows of a chunk to its reader; if they are unusable, the request finishes with an error."""
        assert self.reader is not None
        self.fault = self.reader.keep(chunk, rows) or self.fault

    def add_blocks(self, groups: Sequence[Sequence[int]]) -> None:
        """Put further blocks behind the request's; groups: equally many for each group of layers."""
        if self.group_blocks:
            for held, blocks in zip(self.group_blocks, groups, strict=True):
                held.extend(blocks)
        else:
            self.group_blocks = [list(blocks) for blocks in groups]
            self.blocks = self.group_blocks[0]
        self.count_blocks()

    def add_computed_blocks(self, groups: Sequence[Sequence[int]], parent_serial: int) -> None:
        """Put cached blocks behind the request's; their tokens count as computed. parent_serial: of the last block."""
        self.add_blocks(groups)
        self.num_cached_block_tokens = self.num_computed_tokens = self.num_block_tokens
        self.parent_serial = parent_serial

    def note_cached_block(self, parent_serial: int) -> None:
        """Note that other requests can find one more block. parent_serial: the serial of that block's content."""
        self.num_cached_block_tokens += self.block_size
        self.parent_serial = parent_serial

    def keep_match(self, version: int, groups: list[list[int]]) -> None:
        """Keep the result of a look-up in the prefix cache, which is valid for this version of the pool."""
        self.match = version, groups

    def move_to(self, entry: int, counts: IntArray, tokens: TokenArray) -> None:
        """Keep counts and tokens in these arrays from now on. entry: theirs in the running table, -1 outside of it."""
        self.entry, self.counts, self.tokens = entry, counts, tokens

    def count_blocks(self) -> None:
        """Bring num_block_tokens in line with the blocks."""
        self.num_block_tokens = len(self.blocks) * self.block_size

    def drop_blocks(self) -> list[list[int]]:
        """Return all blocks, by group of layers, to the caller, who must release them."""
        groups, self.group_blocks, self.blocks = self.group_blocks, [], []
        self.num_block_tokens, self.parent_serial = 0, self.prefix_root
        return groups

    @property
    def asks_beyond_sampling(self) -> bool:
        """Whether it needs late rows or a prompt reader, which CUDA graphs of steps with prompts lack."""
        return bool(self.is_late) or self.reader is not None

    @property
    def is_plain(self) -> bool:
        """Whether its draws are plain samples, in which the host has no part."""
        own = self.prepared
        return not (self.is_late or self.scores is not None or own.bits or own.records or own.stateful)

    @property
    def is_drawn_for(self) -> bool:
        """Whether tokens are drawn for it; otherwise it ends with its prompt."""
        return self.reader is None or not self.reader.ends_request

    @property
    def records(self) -> Sequence[tuple[int, IntArray]]:
        """The arguments of its extensions, see Prepared; for extensions that follow tokens, after the last token."""
        return self.prepared.records if self.extensions is None else [*self.prepared.records, *self.extensions.records]

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, whether or not the host knows them."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """True while known tokens must be computed before the request can decode."""
        return self.num_computed_tokens < self.prefill_target

    @property
    def num_known_outputs(self) -> int:
        """Generated tokens that are known on the host."""
        return self.num_known_tokens - self.num_prompt_tokens

    def begin(self) -> RequestBegin:
        """The event for observers when the request begins, or has its first token."""
        return RequestBegin(
            self.id,
            self.arrival_s,
            self.num_prompt_tokens,
            self.params,
            self.priority,
            self.tags,
            self.options.deadline_s,
            is_pooled=not self.is_drawn_for,
            trace=self.options.trace or NO_TAGS,
        )

    def output(
        self, reason: FinishReason, now_s: float, error: str | None = None, *, is_fault: bool = False
    ) -> RequestOutput:
        """The request's output, without text, if it ends now."""
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens[: self.num_prompt_tokens].tolist(),
            token_ids=self.tokens[self.num_prompt_tokens : self.num_known_tokens].tolist(),
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            error=error,
            logprobs=self.scores.sampled() if self.scores is not None else None,
            extensions=self.extensions.results() if self.extensions is not None else None,
            stop_reason=self._stop_reason() if reason is FinishReason.STOP else None,
            timings=Timings(self.arrival_s, self.scheduled_s, self.first_token_s, now_s),
            tags=dict(self.tags),
            priority=self.priority,
            deadline_s=self.options.deadline_s,
            is_fault=is_fault,
            **({} if self.reader is None else self.reader.output()),
        )

    def _stop_reason(self) -> str | int | None:
        if not self.is_drawn_for:
            return None
        last = int(self.tokens[self.num_known_tokens - 1])
        return self.stop_string or (last if last in self.params.stop_token_ids else None)


COUNTS = _counts_of(Request)
"""The entries of `Request.counts`, in this order; each is an attribute of the request, too."""


@dataclass(frozen=True, repr=False)
class RequestFacade:
    """A read-only RequestView of a request."""

    __slots__ = ("_request",)  # by hand: the decorator of Python 3.14 takes properties of Python functions alone

    _request: Request

    id = property(attrgetter("_request.id"))
    arrival_s = property(attrgetter("_request.arrival_s"))
    priority = property(attrgetter("_request.priority"))
    tags = property(attrgetter("_request.tags"))
    deadline_s = property(attrgetter("_request.deadline_s"))
    first_token_s = property(attrgetter("_request.first_token_s"))
    num_prompt_tokens = property(attrgetter("_request.num_prompt_tokens"))
    num_output_tokens = property(attrgetter("_request.num_output_tokens"))
    max_tokens = property(attrgetter("_request.max_tokens"))
    num_tokens = property(attrgetter("_request.num_tokens"))
    num_computed_tokens = property(attrgetter("_request.num_computed_tokens"))
    is_prefilling = property(attrgetter("_request.is_prefilling"))

    def __repr__(self) -> str:
        return f"RequestFacade(id={self.id!r})"
