"""The message that describes one step to every rank: plain integers, no tensors, no objects.

Its sections are packed into one flat int64 array, which is sent to every rank; a rank copies it to its device once and
takes the sections as views. Each section declares the axis of its entries (`Along`), e.g. rows or draws, by which steps
are cut into micro-batches. Legend: T prompt tokens; other sections have one entry for each of the things they name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from itertools import accumulate
from typing import Any

import numpy as np

from hookline.core.util.arrays import IntArray, WordArray, no_ints

READ_WIDTH = 4
"""Integers for each chunk whose hidden states are read: its index, the reader's index, and the reader's flags and size
(core/requests/prompt_readers.py)."""


class Axis(IntEnum):
    """The axes of sections and results: an entry, or a row, belongs to the whole step, a row, a token or a draw.

    STEP: the whole step, e.g. writes to the request table before it is computed. DECODE, CHUNK: its rows, of two kinds.
    TOKEN: the tokens that it computes, decodes first, then chunks' tokens. DRAW: the tokens that it samples, decodes
    first, then sampled chunks. LATE: the draws that wait for late rows.
    """

    STEP, DECODE, CHUNK, TOKEN, DRAW, LATE = range(6)


@dataclass(frozen=True, slots=True)
class Along:
    """How the entries of a section lie along an axis.

    by: the section with the index on the axis that each entry belongs to, perhaps this section; without it, entry i
    belongs to index i. each: the section with the number of entries of each index; without it, one. width: integers of
    an entry; the first is the index, if `by` is this section.
    """

    axis: Axis
    by: str = ""
    each: str = ""
    width: int = 1


def _section(axis: Axis, by: str = "", each: str = "", width: int = 1) -> Any:
    """A section of a step, empty unless it is given, whose entries lie along an axis; see Along."""
    return field(default_factory=no_ints, metadata={"along": Along(axis, by, each, width)})


@dataclass(slots=True)
class Step:
    """The message of a step to a rank. Rows are rows of the request table.

    admit_*: rows taken over by new requests, with their seed and temperature (float32 bits).
    table_*: (row, column, block) entries to write into the block table.
    decode_rows: requests computing one token. chunk_*: requests computing a prompt chunk, with the position of its
    first token and its length; token_ids_T are the chunks' tokens, row after row.
    sampled_chunks: indices of the chunks with draws, in ascending order, an entry for each draw: a chunk named m times
    has a draw after each of its last m tokens. Only decodes of several tokens have several; the host decides which of
    the draws their requests keep, and the row's next step is a chunk again.
    forbidden_*: (index of a draw, token id) pairs that must not be drawn.
    drafting_rows: requests computing their newest token and num_drafts drafts, which the device makes itself from the
    tokens that it has drawn: the host knows neither these nor their positions (core/speculation/rank.py). A step
    with such rows has no others. shown_*: all tokens of such rows from a position on, their number, and the most tokens
    that the request may get, where the device does not know them; row after row.
    late_draws: indices of the draws that wait for late rows, which are sent after the step, one for each of these
    draws: the step is computed up to its hidden states, and tokens are sampled once the rows have come.
    shared_rows: if not empty, the only rows that from now on share their first shared_len cached tokens.
    extension_*: arguments for step extensions: (row, extension, number of values), and the values of all rows, one
    after the other; without values, a row gets the extension's defaults.
    known_*: rows of requests whose extensions read tokens, admitted now: length of the prompt, number of tokens known,
    and the tokens, row after row.
    restored_*: rows into which states are copied from slots, once the rows of admitted requests are zero. saved_*: rows
    whose states are copied into slots after the step is computed (core/kv_cache/snapshots.py).
    reads: chunks whose hidden states are read for results apart from draws, READ_WIDTH integers each; a chunk may be
    named once. read_lens, read_values: how many further integers the reader gets for each, and the integers of all.
    """

    admit_rows: IntArray = _section(Axis.STEP)
    admit_seeds: IntArray = _section(Axis.STEP)
    admit_temperatures: IntArray = _section(Axis.STEP)
    table_rows: IntArray = _section(Axis.STEP)
    table_columns: IntArray = _section(Axis.STEP)
    table_blocks: IntArray = _section(Axis.STEP)
    decode_rows: IntArray = _section(Axis.DECODE)
    chunk_rows: IntArray = _section(Axis.CHUNK)
    chunk_starts: IntArray = _section(Axis.CHUNK)
    chunk_lens: IntArray = _section(Axis.CHUNK)
    token_ids_T: IntArray = _section(Axis.CHUNK, each="chunk_lens")
    sampled_chunks: IntArray = _section(Axis.CHUNK, by="sampled_chunks")
    forbidden_draws: IntArray = _section(Axis.DRAW, by="forbidden_draws")
    forbidden_tokens: IntArray = _section(Axis.DRAW, by="forbidden_draws")
    late_draws: IntArray = _section(Axis.DRAW, by="late_draws")
    drafting_rows: IntArray = _section(Axis.STEP)
    shown_rows: IntArray = _section(Axis.STEP)
    shown_starts: IntArray = _section(Axis.STEP)
    shown_lens: IntArray = _section(Axis.STEP)
    shown_limits: IntArray = _section(Axis.STEP)
    shown_tokens: IntArray = _section(Axis.STEP)
    shared_rows: IntArray = _section(Axis.STEP)
    extension_rows: IntArray = _section(Axis.STEP)
    extension_ids: IntArray = _section(Axis.STEP)
    extension_lens: IntArray = _section(Axis.STEP)
    extension_values: IntArray = _section(Axis.STEP)
    known_rows: IntArray = _section(Axis.STEP)
    known_prompt_lens: IntArray = _section(Axis.STEP)
    known_lens: IntArray = _section(Axis.STEP)
    known_tokens: IntArray = _section(Axis.STEP)
    restored_rows: IntArray = _section(Axis.STEP)
    restored_slots: IntArray = _section(Axis.STEP)
    saved_rows: IntArray = _section(Axis.STEP)
    saved_slots: IntArray = _section(Axis.STEP)
    reads: IntArray = _section(Axis.CHUNK, by="reads", width=READ_WIDTH)
    read_lens: IntArray = _section(Axis.CHUNK, by="reads")
    read_values: IntArray = _section(Axis.CHUNK, by="reads", each="read_lens")
    max_context_len: int = 0
    """Most tokens that any row of the step has in the cache when the step ends."""
    all_greedy: bool = False
    """Every draw of the step is greedy."""
    shared_len: int = 0
    """Tokens that the rows named last in shared_rows share; 0 if this step does not make use of it."""
    extensions: int = 0
    """Bits of the step extensions that a draw of the step goes through; 0 if it is plain."""
    num_logprobs: int = -1
    """Alternatives with log-probabilities for every draw of the step; -1: no draw is scored."""
    num_drafts: int = 0
    """Drafts of each of `drafting_rows`."""
    num_plugin_reads: int = 0
    """How many of `reads` are by plugins."""

    @property
    def num_tokens(self) -> int:
        """Tokens the model computes."""
        return len(self.decode_rows) + len(self.token_ids_T) + len(self.drafting_rows) * (1 + self.num_drafts)

    @property
    def draws_several(self) -> bool:
        """Whether a row of it draws several tokens."""
        chunks = self.sampled_chunks
        return len(chunks) > 1 and bool((chunks[1:] == chunks[:-1]).any())

    @property
    def changes_table(self) -> bool:
        """Whether the request table on the device learns of requests, states, blocks or prefixes by it."""
        return any(len(one) for one in (self.admit_rows, self.restored_rows, self.table_rows, self.shared_rows))

    @property
    def brings_to_extensions(self) -> bool:
        """Whether it has arguments or tokens for step extensions, which they must have before it is computed."""
        return len(self.extension_rows) > 0 or len(self.known_rows) > 0 or (self.extensions != 0 and self.draws_several)

    @property
    def is_agreed_on(self) -> bool:
        """Whether plugins run in it that may fail for single requests; ranks must then agree whether they did."""
        return self.extensions != 0 or self.num_plugin_reads > 0

    @property
    def num_sampled(self) -> int:
        """Tokens drawn."""
        return len(self.decode_rows) + len(self.sampled_chunks) + len(self.drafting_rows) * (1 + self.num_drafts)


HEADER = tuple(one.name for one in fields(Step) if one.type in ("int", "bool"))
"""Names of the plain numbers of a step; in its packed form they come first."""
SECTIONS = tuple(one.name for one in fields(Step) if one.name not in HEADER)
"""Names of the array sections, in the order they are packed."""
ALONG: Mapping[str, Along] = {one.name: one.metadata["along"] for one in fields(Step) if one.name in SECTIONS}
"""How the entries of each section lie along an axis."""
_PLACES = {name: place for place, name in enumerate(SECTIONS)}


def pack(step: Step) -> IntArray:
    """A step as one array: its plain numbers, the length of each section, then the sections."""
    sections = [getattr(step, name) for name in SECTIONS]
    header = [*(int(getattr(step, name)) for name in HEADER), *map(len, sections)]
    return np.concatenate([np.array(header, dtype=np.int64), *sections])


_EXTENSIONS, _PLUGIN_READS = HEADER.index("extensions"), HEADER.index("num_plugin_reads")


def is_agreed_on(message: IntArray) -> bool:
    """Step.is_agreed_on of a packed step; False of other messages."""
    return bool(message[0] >= 0 and (message[_EXTENSIONS] or message[_PLUGIN_READS]))


LATE_ROWS, TIME_STEPS = -1, -2
"""First words of messages that are not steps: late rows of the step before, and the order to rank 0 to time steps. The
first word of a step is no less than 0."""


def pack_late_rows(rows_NW: WordArray) -> IntArray:
    """The rows that the draws of the step sent last wait for, as a message of their own."""
    return np.concatenate([np.array([LATE_ROWS, len(rows_NW)], dtype=np.int64), rows_NW.reshape(-1).view(np.int64)])


def pack_time_steps() -> IntArray:
    """The message that tells rank 0 to time its steps from now on."""
    return np.array([TIME_STEPS], dtype=np.int64)


def late_rows_in(message: IntArray) -> WordArray | None:
    """The rows that `pack_late_rows` wrote; None if the message is a step."""
    return message[2:].view(np.int32).reshape(int(message[1]), -1) if message[0] == LATE_ROWS else None


class Sections(Mapping[str, Any]):
    """The sections of a packed buffer (an array or a tensor) by name, as views, which are made on access."""

    __slots__ = ("_buffer", "_ends")

    def __init__(self, buffer: Any, lengths: Iterable[int]) -> None:
        self._buffer = buffer
        self._ends = list(accumulate(lengths, initial=len(HEADER) + len(SECTIONS)))

    def __getitem__(self, name: str) -> Any:
        place = _PLACES[name]
        return self._buffer[self._ends[place] : self._ends[place + 1]]

    def __iter__(self) -> Iterator[str]:
        return iter(SECTIONS)

    def __len__(self) -> int:
        return len(SECTIONS)


def unpack(buffer: IntArray) -> Step:
    """The step that `pack` wrote; its sections are views of the buffer."""
    numbers = buffer[: len(HEADER) + len(SECTIONS)].tolist()
    plain = dict(zip(HEADER, numbers, strict=False))
    plain["all_greedy"] = bool(plain["all_greedy"])
    return Step(**Sections(buffer, numbers[len(HEADER) :]), **plain)
