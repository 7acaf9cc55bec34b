"""The device's half of reading prompts: each reader gets hidden states of a step's prompt chunks and returns rows.

A step names chunks, and readers by index; steps that read nothing do not come here.
Legend: T tokens of a step, D hidden, B chunks of a call, F numbers of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from hookline.core.step.executor import read_by
from hookline.core.step.message import READ_WIDTH, Step
from hookline.core.util.arrays import IntArray
from hookline.core.worker.request_table import on_device

DeviceRows = Mapping[str, Tensor]
"""The rows (P, F) float32 of each reader, in the order of their chunks; see read_by."""


@dataclass(frozen=True)
class Group:
    """The chunks of a step that one reader reads, as arrays on the host.

    reader: the reader's index. rows, starts, lens: of each chunk, its request's row, the position of the first token
    that is read, and the number of tokens read. flags, sizes, values: see core/requests/prompt_readers.py. tokens:
    indices of the tokens read among the step's tokens.
    """

    reader: int
    rows: IntArray
    starts: IntArray
    lens: IntArray
    flags: IntArray
    sizes: IntArray
    values: IntArray
    tokens: IntArray


class RankReader(Protocol):
    """Makes rows of hidden states on a rank."""

    num_columns: int
    """F, if that is known before the rows are there; 0 otherwise."""

    @property
    def reads_last(self) -> bool:
        """Whether each chunk's last token is enough; otherwise it reads a chunk from its first token on."""
        ...

    def run(self, group: Group, hidden_TD: Tensor) -> Tensor | None:
        """The rows (P, F) float32 computed from the hidden states of the group's tokens; None if there are none.

        Raises: RequestFault, from plugins' readers alone, whose index is FIRST_PLUGIN or more.
        """
        ...


class PromptReaders:
    """The readers of a rank, by index."""

    def __init__(self) -> None:
        self._readers: dict[int, RankReader] = {}

    def add(self, readers: Mapping[int, RankReader]) -> None:
        """Add these readers."""
        self._readers.update(readers)

    def clear(self) -> None:
        """Remove all readers."""
        self._readers.clear()

    def groups(self, step: Step) -> list[Group]:
        """The chunks that a step's readers read, in one group for each reader."""
        reads_P4, ends = step.reads.reshape(-1, READ_WIDTH), np.cumsum(step.read_lens)
        firsts = len(step.decode_rows) + np.cumsum(step.chunk_lens) - step.chunk_lens
        found = []
        for index in sorted(set(reads_P4[:, 1].tolist())):  # np.unique's first call imports numpy.ma, for 40 ms
            (own,) = (reads_P4[:, 1] == index).nonzero()
            chunks, counts = reads_P4[own, 0], step.read_lens[own]
            starts, lens, places = step.chunk_starts[chunks], step.chunk_lens[chunks], firsts[chunks]
            if self._readers[index].reads_last:
                starts, places, lens = starts + lens - 1, places + lens - 1, np.ones_like(lens)
            elif counts.any():  # a value for each token that is read
                lens = counts
            tokens, values = _spans(places, lens), step.read_values[_spans(ends[own] - counts, counts)]
            flags, sizes = reads_P4[own, 2], reads_P4[own, 3]
            found.append(Group(index, step.chunk_rows[chunks], starts, lens, flags, sizes, values, tokens))
        return found

    def read_last(self, groups: Sequence[Group]) -> bool:
        """Whether the readers of these groups need only the last token of each chunk."""
        return all(self._readers[group.reader].reads_last for group in groups)

    def run(self, groups: Sequence[Group], hidden_TD: Tensor, *, is_whole: bool) -> DeviceRows:
        """The readers' rows of a step. hidden_TD: of all the step's tokens if is_whole; else of the groups' tokens
        alone, one group after the other.

        Raises: RequestFault naming the plugin that failed, and the rows of its requests.
        """
        found, first = dict[str, Tensor](), 0
        for group in groups:
            count = len(group.tokens)
            if is_whole:
                own_TD = hidden_TD.index_select(0, on_device(group.tokens, hidden_TD.device))
            else:
                own_TD = hidden_TD[first : first + count]
            first += count
            rows_PF = self._readers[group.reader].run(group, own_TD)
            if rows_PF is not None:
                found[read_by(group.reader)] = rows_PF
        return found

    def shapes(self, step: Step) -> dict[str, tuple[int, int]]:
        """The shapes of a step's rows, if all its readers have num_columns: a row for each value of the group."""
        groups = self.groups(step) if len(step.reads) else ()
        return {read_by(one.reader): (len(one.values), self._readers[one.reader].num_columns) for one in groups}


def _spans(starts: IntArray, lens: IntArray) -> IntArray:
    """The integers start, start + 1, ... of each span, as many as its length, one span after the other."""
    found: IntArray = np.repeat(starts - (np.cumsum(lens) - lens), lens) + np.arange(lens.sum())
    return found
