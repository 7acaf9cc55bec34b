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
WordArray = np.ndarray[Any, np.dtype[np.int32]]
"""Masks of tokens as `core.contracts.grammar` has them, one row or several."""


_NO_INTS: IntArray = np.empty(0, dtype=np.int64)


def no_ints() -> IntArray:
    """An empty section; always the same array, as nothing can be written to it."""
    return _NO_INTS


def every(flags: BoolArray | IntArray) -> bool:
    """Whether all flags are set; four times as fast as `flags.all()`."""
    return bool(np.count_nonzero(flags) == len(flags))


def ints(values: Iterable[int]) -> IntArray:
    """An int64 section from Python integers."""
    return np.fromiter(values, dtype=np.int64)


def without(entries: IntArray, others: IntArray) -> IntArray:
    """The entries that are not among `others`, both of at least 0; ten times as fast as `np.isin`."""
    is_other = np.zeros(max(int(entries.max(initial=0)), int(others.max(initial=0))) + 1, dtype=bool)
    is_other[others] = True
    return entries[~is_other[entries]]


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask: an even number, so that masks travel as 64-bit words."""
    return 2 * -(-vocab_size // 64)


def float_bits(values: Iterable[float]) -> IntArray:
    """float32 bit patterns as integers, the form in which a Step carries floats."""
    return np.fromiter(values, dtype=np.float32).view(np.int32).astype(np.int64)


def ranges_of(index: Any, num_dims: int) -> list[slice]:
    """An index as a list with one slice for each of num_dims dimensions.

    index: a slice or a tuple of slices for the first dimensions; an ellipsis, or a missing slice, means whole ones.
    """
    given = index if isinstance(index, tuple) else (index,)
    found = [one for one in given if one is not Ellipsis]
    return [*found, *[slice(None)] * (num_dims - len(found))]
