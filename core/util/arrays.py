"""Arrays of int64, the form in which steps and counts travel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
VectorArray = np.ndarray[Any, np.dtype[np.float32]]
TokenArray = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids of a request."""
MaskArray = np.ndarray[Any, np.dtype[np.int32]]
"""Masks of tokens as `core.contracts.grammar` has them, one row or several."""


_NO_INTS: IntArray = np.empty(0, dtype=np.int64)


def no_ints() -> IntArray:
    """A section without entries; always the same one, as there is nothing in it to write to."""
    return _NO_INTS


def every(flags: BoolArray | IntArray) -> bool:
    """Whether all are set, as `flags.all()` says in four times the time."""
    return bool(np.count_nonzero(flags) == len(flags))


def ints(values: Iterable[int]) -> IntArray:
    """An int64 section from Python integers."""
    return np.fromiter(values, dtype=np.int64)


def without(entries: IntArray, others: IntArray) -> IntArray:
    """Those entries of a table that are not among the others, as `np.isin` finds them in ten times the time."""
    is_other = np.zeros(max(int(entries.max(initial=0)), int(others.max(initial=0))) + 1, dtype=bool)
    is_other[others] = True
    return entries[~is_other[entries]]


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask: an even number, so that masks travel as 64-bit words."""
    return 2 * -(-vocab_size // 64)


def float_bits(values: Iterable[float]) -> IntArray:
    """float32 bit patterns, as integers: how a Step carries floats."""
    return np.fromiter(values, dtype=np.float32).view(np.int32).astype(np.int64)


def ranges_of(index: Any, num_dims: int) -> list[slice]:
    """What a tensor of so many dimensions is indexed with: a range for each of them.

    index: of the first dimensions, a slice or a tuple of them; an ellipsis stands for those that are left out.
    """
    given = index if isinstance(index, tuple) else (index,)
    found = [one for one in given if one is not Ellipsis]
    return [*found, *[slice(None)] * (num_dims - len(found))]
