"""Cuts a step into micro-batches, which are steps themselves and which the stages of a model compute in turn.

Every rank cuts by the same rule, so micro-batches need not be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hookline.core.step.message import ALONG, HEADER, Along, Axis, Step
from hookline.core.util.arrays import Array, BoolArray, IntArray

PIECES: Mapping[Axis, Sequence[Along]] = {
    Axis.TOKEN: (Along(Axis.DECODE), ALONG["token_ids_T"]),
    Axis.DRAW: (Along(Axis.DECODE), ALONG["sampled_chunks"]),
    Axis.LATE: (ALONG["late_draws"],),
}
"""The sections that an axis joins: the entries of the first section, then the entries of the second."""


class Members:
    """Which of a step's entries a micro-batch has, along each axis; computed at the first access."""

    def __init__(self, step: Step, decodes: slice, chunks: slice) -> None:
        self._step = step
        self._found = {
            Axis.DECODE: np.zeros(len(step.decode_rows), bool),
            Axis.CHUNK: np.zeros(len(step.chunk_rows), bool),
        }
        self._found[Axis.DECODE][decodes] = self._found[Axis.CHUNK][chunks] = True

    def of(self, axis: Axis) -> BoolArray:
        """For each entry of the axis, whether the micro-batch has it."""
        if axis not in self._found:
            self._found[axis] = np.concatenate([self.along(piece) for piece in PIECES[axis]])
        return self._found[axis]

    def along(self, along: Along) -> BoolArray:
        """For each integer of a section, whether the micro-batch has it."""
        found = self.of(along.axis)
        if along.by:
            found = found[self.named(along)]
        if along.each:
            return found.repeat(getattr(self._step, along.each))
        return found if along.width == 1 else found.repeat(along.width)

    def named(self, along: Along) -> IntArray:
        """The indices by which a section's entries are named."""
        indices: IntArray = getattr(self._step, along.by)[:: ALONG[along.by].width]
        return indices


@dataclass(frozen=True)
class MicroBatch:
    """A part of a step, which is a step itself. members: the entries of the whole step that it has."""

    step: Step
    members: Members

    def places(self, axis: Axis) -> IntArray:
        """Where its entries along an axis stand among the whole step's."""
        return np.flatnonzero(self.members.of(axis))


def cut(step: Step, most: int) -> list[MicroBatch]:
    """Cut a step into at most `most` micro-batches, none of them empty, in the order in which they are computed.

    Decodes are cut into equal parts, in their order. Prompt chunks are not cut, but distributed in their order so that
    micro-batches have about the same number of tokens. A step of one row is one micro-batch.
    """
    num_decodes, num_chunks = len(step.decode_rows), len(step.chunk_rows)
    count = max(1, min(most, num_decodes + num_chunks))
    if count == 1:
        return [MicroBatch(step, Members(step, slice(None), slice(None)))]
    decodes = [index * num_decodes // count for index in range(count + 1)]
    spans = zip(pairwise(decodes), pairwise(_chunk_bounds(step.chunk_lens, decodes)), strict=True)
    filled = [(row, chunk) for row, chunk in spans if row[0] < row[1] or chunk[0] < chunk[1]]
    return [_part(step, slice(*row), slice(*chunk), is_first=index == 0) for index, (row, chunk) in enumerate(filled)]


def _chunk_bounds(lens: IntArray, decodes: Sequence[int]) -> list[int]:
    """Where to cut the list of chunks, so that micro-batches, with their decodes, have about equally many tokens."""
    ends, count = np.concatenate([[0], np.cumsum(lens)]), len(decodes) - 1
    total = decodes[-1] + int(ends[-1])
    bounds = [0]
    for index in range(1, count):
        missing = np.abs(decodes[index] + ends - total * index / count)
        bounds.append(max(bounds[-1], int(missing.argmin())))
    return [*bounds, len(lens)]


def _part(step: Step, decodes: slice, chunks: slice, *, is_first: bool) -> MicroBatch:
    """The micro-batch of these decodes and chunks. is_first: whether it gets the sections of the whole step."""
    members, sections = Members(step, decodes, chunks), dict[str, Any]()
    for name, along in ALONG.items():
        values = getattr(step, name)
        if along.axis is Axis.STEP and is_first:
            sections[name] = values
        elif along.axis is not Axis.STEP and len(values):
            kept = sections[name] = values[members.along(along)]
            if along.by == name:  # renumber its indices within the part
                kept[:: along.width] = members.of(along.axis).cumsum()[kept[:: along.width]] - 1
    return MicroBatch(Step(**sections, **{name: getattr(step, name) for name in HEADER}), members)


def joined(parts: Sequence[MicroBatch], results: Sequence[Array], axis: Axis = Axis.DRAW) -> Array:
    """The results of a step along an axis, joined from the results of its micro-batches."""
    if len(parts) == 1:
        return results[0]
    widest = max(results, key=np.ndim)
    found = np.empty((sum(map(len, results)), *widest.shape[1:]), dtype=widest.dtype)
    for part, rows in zip(parts, results, strict=True):
        if len(rows):
            found[part.places(axis)] = rows
    return found
