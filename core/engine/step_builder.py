"""Builds a step's message while its plan is carried out: rows, tokens, block tables, extensions' arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.kv_cache.shared_prefix import shared_prefix
from hookline.core.requests.prompt_readers import FIRST_PLUGIN, ChunkRead
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.running_table import RunningTable, Sampled
from hookline.core.requests.scores import rounded_logprobs
from hookline.core.step.executor import StepResult
from hookline.core.step.message import Step
from hookline.core.util.arrays import BoolArray, IntArray, every, float_bits, ints, no_ints, without

Sections = dict[str, Any]
"""Fields of a Step by name."""
Record = tuple[int, int, IntArray]
"""Arguments of a step extension: the row of the request table, the extension's index, the values."""
Chunk = tuple[Request, int, int]
"""A request, the position of the chunk's first token, and its length."""


class ArgumentWriter:
    """Writes the arguments of step extensions into steps; one per engine.

    While no request uses an extension, it costs two look-ups in empty dicts a step.
    """

    def __init__(self, num_rows: int) -> None:
        self._loaded = [0] * num_rows
        self._running: set[int] = set()
        self._ever = 0
        self.awaited: set[int] = set()
        """Running requests with extensions that compute their next arguments on the host from the last token."""

    def lose(self) -> None:
        """After a lost step: send the arguments of all rows again, as they may not have reached the ranks."""
        self._loaded = [self._ever] * len(self._loaded)

    def forget(self, request: Request) -> None:
        """Note that the request gave its row back."""
        self._running.discard(request.id)
        self.awaited.discard(request.id)

    def sections(self, admitted: Sequence[Request], chunks: Sequence[Chunk], sampled: Iterable[Request]) -> Sections:
        """The extension_* and known_* sections, `extensions` and `num_logprobs`, without the empty ones."""
        records: list[Record] = []
        for request in admitted:
            records += self._records(request)
        if self.awaited:
            sampled = list(sampled)
            records += [record for request in sampled for record in self._followed(request)]
        sections: Sections = {}
        if records:
            sections["extension_rows"] = ints(row for row, _, _ in records)
            sections["extension_ids"] = ints(index for _, index, _ in records)
            sections["extension_lens"] = ints(len(values) for _, _, values in records)
            sections["extension_values"] = np.concatenate([values for _, _, values in records])
        if self._running:
            sections |= known_tokens([request for request in admitted if request.prepared.reads_tokens])
            extensions, num_logprobs = 0, -1
            for request in sampled:
                if request.params.logprobs is not None:
                    num_logprobs = max(num_logprobs, request.params.logprobs)
                prepared = request.prepared
                extensions |= prepared.used(request.num_output_tokens) if prepared.ends else prepared.bits
            for request, _, _ in chunks:
                extensions |= request.prepared.layer_bits  # also of chunks that no draw follows
            sections["extensions"] = extensions
            sections["num_logprobs"] = num_logprobs if num_logprobs < 0 else rounded_logprobs(num_logprobs)
        return sections

    def _records(self, request: Request) -> list[Record]:
        """The request's own arguments, and the defaults of extensions that the row's last owner had arguments for."""
        own = request.records
        if request.extensions is not None and request.extensions.is_awaited:
            self.awaited.add(request.id)
        if own or request.scores is not None:
            self._running.add(request.id)
        if not own and not self._loaded[request.row]:
            return []
        wanted = sum(1 << index for index, _ in own)
        self._ever |= wanted
        stale, self._loaded[request.row] = self._loaded[request.row] & ~wanted, wanted
        resets = [(request.row, index, no_ints()) for index in range(stale.bit_length()) if stale >> index & 1]
        return resets + [(request.row, index, values) for index, values in own]

    def _followed(self, request: Request) -> list[Record]:
        """The arguments that a running request's extensions have after its last token, if they follow its tokens."""
        if request.id not in self.awaited or request.extensions is None or not request.num_output_tokens:
            return []
        return [(request.row, index, values) for index, values in request.extensions.records]


class TokenOwners(NamedTuple):
    """For each token of a step, in the order in which ranks compute them: the request's id, and the position."""

    request_ids_T: IntArray
    positions_T: IntArray


def owners_of(table: RunningTable, decode: IntArray, dispatched: Dispatched) -> TokenOwners:
    """The owners of a launched step's tokens.

    decode: the decodes of its plan, those of several tokens among them.
    """
    chunked = [(row.request, row.start, len(row.tokens)) for row in dispatched.multi_token]
    if chunked:
        decode = without(decode, ints(request.entry for request, _, _ in chunked))
    owners, places = [table.id_S[decode]], [table.num_computed_tokens_S[decode] - 1]
    for request, start, length in (*dispatched.chunks, *chunked):
        owners.append(np.full(length, request.id))
        places.append(np.arange(start, start + length))
    return TokenOwners(np.concatenate(owners), np.concatenate(places))


def known_tokens(requests: Sequence[Request]) -> Sections:
    """The known_* sections: all tokens of newly admitted requests, also those generated before a preemption."""
    if not requests:
        return {}
    tokens = [request.tokens[: request.num_tokens] for request in requests]
    return {
        "known_rows": ints(request.row for request in requests),
        "known_prompt_lens": ints(request.num_prompt_tokens for request in requests),
        "known_lens": ints(request.num_tokens for request in requests),
        "known_tokens": np.concatenate(tokens, dtype=np.int64),
    }


@dataclass(slots=True)
class MultiTokenDecode:
    """A decode that computes several tokens as a chunk, with a draw after each; how many of the draws behind the first
    one count is decided at the commit. start: position of its newest token, which comes first; tokens: that token and
    those behind it, which may be numbers without a meaning if only the device knows them.
    """

    request: Request
    start: int
    tokens: list[int]

    @property
    def num_behind(self) -> int:
        """Tokens behind the newest one."""
        return len(self.tokens) - 1

    def shorten(self, num_tokens: int) -> None:
        """Compute the first so many tokens alone."""
        self.tokens = self.tokens[:num_tokens]


class Decodes(NamedTuple):
    """The decodes of a step. plain: the running table's entries of requests that compute one token.

    multi_token, entries: requests that compute several tokens, and their entries. max_tokens: most tokens that one
    request may compute. on_device: the sections by which the device computes several tokens, if it alone knows them:
    the step has no other rows then. max_context_len: most tokens that a request of such a step has in the cache.
    """

    plain: IntArray
    multi_token: Sequence[MultiTokenDecode] = ()
    entries: IntArray = no_ints()
    max_tokens: int = 1
    on_device: Sections | None = None
    max_context_len: int = 0


@dataclass(slots=True)
class StepDraft:
    """The contents of a step's message, collected while its plan is carried out.

    table: new entries of the block table, (row, column, block). num_new_tokens: for each chunk, how many of its tokens
    are computed for the first time. restored, saved: the copies of states before and after the step, (row, slot).
    """

    admitted: list[Request] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    restored: Sequence[tuple[int, int]] = ()
    saved: Sequence[tuple[int, int]] = ()

    def note_states(self, restored: Sequence[tuple[int, int]], saved: Sequence[tuple[int, int]]) -> None:
        """Copy these states before and after the step."""
        self.restored, self.saved = restored, saved


@dataclass(slots=True)
class Dispatched:
    """A step's message, the requests that it samples a token for, and counts for the statistics."""

    step: Step
    sampled: Sampled
    num_prefill_tokens: int
    num_cached_tokens: int
    num_prompt_tokens: int
    """Tokens of the prompts that begin with this step; some may be cached."""
    got_further: bool
    """Whether any request computes a token it never computed before."""
    chunks: Sequence[Chunk]
    num_new_tokens: Sequence[int]
    """For each chunk, how many of its tokens are computed for the first time."""
    admitted: Sequence[Request]
    reads: Sequence[tuple[Request, ChunkRead]] = ()
    """Its reads of prompts (prompt log-probabilities, pooling), in the order of their chunks."""
    ending: Sequence[Request] = ()
    """The requests that end with their last chunk, for which nothing is drawn."""
    multi_token: Sequence[MultiTokenDecode] = ()
    """The decodes of several tokens. They come last among the sampled requests, which are named once each, and among
    the draws, of which such a row has several."""
    max_tokens: int = 1
    """Most tokens that a decode of it may compute."""
    late: Sequence[tuple[Request, Sequence[int]]] = ()
    """The requests whose draws wait for late rows, with the tokens that draws follow, in the order of the rows."""

    @property
    def num_plain_draws(self) -> int:
        """Draws of rows that have one, which come first."""
        return len(self.sampled.entries_N) - len(self.multi_token)


class Decoding:
    """Which tokens the decodes of an engine compute: one each. A subclass may have some compute several (speculation).

    The engine's parts call it at these points of a step, in this order.
    """

    max_tokens = 1
    """Most tokens that a decode computes in any step."""
    reads_states = False
    """Whether `show` is given the hidden states of steps, in place of observers."""
    counts: Any = None
    """See EngineView.speculation."""
    kept_ids: Sequence[int] = ()
    """Of the step that was committed last: the request of each token beyond the first one of its row."""

    def join(self, queue: RequestQueue, cache: KVCacheManager) -> None:
        """Work for the engine with these requests and this cache; called once, before all else."""

    def may_overlap(self, plan: CheckedPlan) -> bool:
        """Whether the step of this plan can be launched before the tokens of the step in flight are known."""
        return True

    def look_ahead(self, dispatched: Dispatched) -> None:
        """Prepare the next step, while the device computes this one, whose tokens it waits for."""

    def extend(self, plan: CheckedPlan, draft: StepDraft, *, is_ahead: bool) -> Decodes:
        """The decodes of a step that has all its other rows. Their newest tokens count as computed by now, and have
        blocks. is_ahead: whether the tokens of the step in flight are not known yet.
        """
        return Decodes(plan.decode)

    def lose(self) -> None:
        """Note that a launched step was lost."""

    def accept(self, dispatched: Dispatched, result: StepResult) -> tuple[StepResult, Sequence[int]]:
        """The result of a step with decodes of several tokens, with a draw for each token, and of each of them how many
        of the draws behind the first one count: 0 if its request has ended.
        """
        raise AssertionError("no decode computes several tokens")

    def show(self, owners: TokenOwners, layers: Mapping[int, Any]) -> None:
        """Read the hidden states of a step whose tokens were kept, by layer; `reads_states` says whether."""

    def note_kept(self, dispatched: Dispatched, num_kept: Mapping[int, int], now: Callable[[], float]) -> None:
        """Note that a step's tokens were kept. num_kept: as of `count_step`. now: the engine's clock."""

    def count_step(self, rows: Sequence[MultiTokenDecode], num_kept: Mapping[int, int]) -> None:
        """Count these decodes. num_kept: how many draws behind the first one were kept of each, by the request's id."""

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""

    def close(self) -> None:
        """Release all memory; called when the engine is closed."""


class StepWriter:
    """Writes the messages of an engine's steps. arguments: writes the sections of step extensions."""

    def __init__(self, table: RunningTable, arguments: ArgumentWriter, *, shares_prefixes: bool) -> None:
        self.table, self.arguments, self.shares_prefixes = table, arguments, shares_prefixes
        self._decoding, self._shared_len = no_ints(), 0

    def lose(self) -> None:
        """After a lost step: send its extension arguments and shared prefix again, as they may not have arrived."""
        self.arguments.lose()
        self._decoding, self._shared_len = no_ints(), 0

    def write(self, draft: StepDraft, decodes: Decodes, *, got_further: bool) -> Dispatched:
        """Write the message of a step."""
        table, admitted, chunks = self.table, draft.admitted, draft.chunks
        decode, multi_token, entries = decodes.plain, decodes.multi_token, decodes.entries
        sections: Sections = {"decode_rows": table.row_S[decode]}
        if admitted:
            sections |= admitted_rows(admitted)
            self._decoding = no_ints()  # a preempted request may return in another one's row
        if draft.table:
            sections |= block_table_entries(draft.table)
        for name, pairs in (("restored", draft.restored), ("saved", draft.saved)):
            if pairs:
                sections[f"{name}_rows"], sections[f"{name}_slots"] = np.array(pairs, dtype=np.int64).T
        computing = sampled = decode
        reads: Sequence[tuple[Request, ChunkRead]] = ()
        ending: Sequence[Request] = ()
        if chunks:
            chunked = ints(request.entry for request, _, _ in chunks)
            is_sampled = table.can_decode(chunked)
            if table.num_reading:
                read_sections, reads = chunk_reads(chunks, is_sampled)
                sections |= read_sections
                is_drawn_for = ints(request.is_drawn_for for request, _, _ in chunks) > 0
                ending = [chunks[index][0] for index in np.flatnonzero(is_sampled & ~is_drawn_for)]
                is_sampled &= is_drawn_for
            sampled_chunks = np.flatnonzero(is_sampled)
            sections |= prompt_chunks(chunks)
            sections["sampled_chunks"] = sampled_chunks
            computing = np.concatenate([decode, chunked])
            sampled = np.concatenate([decode, chunked[sampled_chunks]])
        draws, max_context_len, num_chunked = sampled, decodes.max_context_len, 0
        ahead: IntArray | int = 0
        if decodes.on_device is not None:
            draws = computing = sampled = entries
            sections |= decodes.on_device
        elif multi_token:
            lengths, max_context_len = add_multi_token(sections, decodes, table.row_S[entries], len(chunks))
            draws, num_chunked, num_plain = entries.repeat(lengths), int(lengths.sum()), len(sampled)
            ahead = np.arange(num_chunked) - (lengths.cumsum() - lengths).repeat(lengths)
            if num_plain:
                draws, ahead = np.concatenate([sampled, draws]), np.concatenate([np.zeros_like(sampled), ahead])
            computing, sampled = np.concatenate([computing, entries]), np.concatenate([sampled, entries])
        if table.num_delaying:
            sections |= self.forbidden_tokens(draws, ahead)
        late: list[tuple[Request, Sequence[int]]] = []
        if table.num_late:
            sections["late_draws"] = np.flatnonzero(table.is_late_S[draws])
            plain = sampled[: len(sampled) - len(multi_token)]
            late += ((request, ()) for request in table.requests(plain[table.is_late_S[plain] > 0]))
            late += ((row.request, row.tokens[1:]) for row in multi_token if row.request.late is not None)
        sections |= self.arguments.sections(admitted, chunks, table.requests(sampled))
        if self.shares_prefixes and not chunks and not multi_token:
            sections |= self._shared_prefix(decode)
        step = Step(
            **sections,
            max_context_len=int(table.num_computed_tokens_S[computing].max(initial=max_context_len)),
            all_greedy=every(table.is_greedy_S[sampled]),
        )
        begun = [request for request in admitted if request.num_preemptions == 0]
        return Dispatched(
            step,
            table.sampled(sampled),
            num_prefill_tokens=len(step.token_ids_T) - num_chunked,
            num_cached_tokens=sum(request.num_cached_tokens for request in begun),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in begun),
            got_further=got_further,
            chunks=chunks,
            num_new_tokens=draft.num_new_tokens,
            admitted=admitted,
            reads=reads,
            ending=ending,
            multi_token=multi_token,
            max_tokens=decodes.max_tokens,
            late=late,
        )

    def forbidden_tokens(self, sampled: IntArray, ahead: IntArray | int = 0) -> Sections:
        """The forbidden_* sections: stop tokens are forbidden to requests that have not reached their min_tokens.

        ahead: for each draw, how many tokens behind the newest one it follows.
        """
        (places,) = (self.table.num_tokens_S[sampled] + ahead < self.table.min_len_S[sampled]).nonzero()
        if not len(places):
            return {}
        stops = [request.stops_X for request in self.table.requests(sampled[places])]
        lengths = [len(stops_X) for stops_X in stops]
        return {"forbidden_draws": places.repeat(lengths), "forbidden_tokens": np.concatenate(stops)}

    def _shared_prefix(self, decode: IntArray) -> Sections:
        """The section of the decodes' shared prefix; computed again only when the set of decodes changes."""
        decoding = self.table.id_S[decode]
        if np.array_equal(decoding, self._decoding):
            return {"shared_len": self._shared_len}
        self._decoding = decoding
        group, self._shared_len = shared_prefix(list(self.table.requests(decode)))
        return {"shared_rows": ints(request.row for request in group), "shared_len": self._shared_len}


def admitted_rows(admitted: Sequence[Request]) -> Sections:
    """The admit_* sections."""
    return {
        "admit_rows": ints(request.row for request in admitted),
        "admit_seeds": ints(request.seed for request in admitted),
        "admit_temperatures": float_bits(request.temperature for request in admitted),
    }


def block_table_entries(entries: Sequence[tuple[int, int, int]]) -> Sections:
    """The table_* sections: new entries of the block table."""
    return dict(zip(("table_rows", "table_columns", "table_blocks"), np.array(entries, dtype=np.int64).T, strict=True))


def prompt_chunks(chunks: Sequence[Chunk]) -> Sections:
    """The chunk_* sections, and the chunks' tokens."""
    tokens = [request.tokens[start : start + num_tokens] for request, start, num_tokens in chunks]
    return {
        "chunk_rows": ints(request.row for request, _, _ in chunks),
        "chunk_starts": ints(start for _, start, _ in chunks),
        "chunk_lens": ints(num_tokens for _, _, num_tokens in chunks),
        "token_ids_T": np.concatenate(tokens, dtype=np.int64),
    }


def add_multi_token(sections: Sections, decodes: Decodes, rows: IntArray, num_chunks: int) -> tuple[IntArray, int]:
    """Put decodes of several tokens behind a step's prompt chunks: each is a chunk with a draw after each token.

    rows: of the request table. Returns their lengths, and the most tokens that one of them then has in the cache.
    """
    starts = ints(row.start for row in decodes.multi_token)
    lengths = ints(len(row.tokens) for row in decodes.multi_token)
    added = {
        "chunk_rows": rows,
        "chunk_starts": starts,
        "chunk_lens": lengths,
        "token_ids_T": ints(chain.from_iterable(row.tokens for row in decodes.multi_token)),
        "sampled_chunks": np.arange(num_chunks, num_chunks + len(rows)).repeat(lengths),
    }
    for name, values in added.items():
        sections[name] = np.concatenate([sections[name], values]) if name in sections else values
    return lengths, int((starts + lengths).max())


def chunk_reads(chunks: Sequence[Chunk], is_last: BoolArray) -> tuple[Sections, list[tuple[Request, ChunkRead]]]:
    """The read_* sections and the reads of these chunks. is_last: for each chunk, whether it ends its prompt."""
    found = [
        (index, request, read)
        for index, (request, start, length) in enumerate(chunks)
        if request.reader is not None
        and (read := request.reader.read(request.tokens, start, length, is_last=bool(is_last[index]))) is not None
    ]
    if not found:
        return {}, []
    sections = {
        "reads": ints(number for index, _, one in found for number in (index, one.index, one.flags, one.size)),
        "read_lens": ints(len(one.values) for _, _, one in found),
        "read_values": np.concatenate([one.values for _, _, one in found]),
        "num_plugin_reads": sum(one.index >= FIRST_PLUGIN for _, _, one in found),
    }
    return sections, [(request, one) for _, request, one in found]
