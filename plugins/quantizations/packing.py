"""Values of few bits that lie several to a word, in the orders that formats have.

Legend: rows are outputs and columns inputs, of values, or of blocks of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import HALF_INT4

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of a word AWQ has the first of eight neighbours, the second, and so on."""


@dataclass(frozen=True)
class PackedRead:
    """Reads a rectangle of a packed tensor; see `loading.Read`. Reads no more words than it must.

    bits: of a value; values of 3, 5, 6 and 7 bits lie without gaps, across the ends of words, unless has_gaps. along:
    which neighbours share a word. transposed: whether the tensor is stored columns first. word_bits: of a word. order:
    the place in a word of each neighbour, if they do not lie in order. then: what is done to the values, which are
    int32. has_gaps: each value lies within one word, whose last bits are unused.
    """

    bits: int
    along: Literal["rows", "columns"]
    transposed: bool = False
    word_bits: int = 32
    order: tuple[int, ...] | None = None
    then: Callable[[Tensor], Tensor] | None = None
    has_gaps: bool = False

    def __call__(self, whole: Any, rows: slice, columns: slice) -> Tensor:
        """The values: (rows, columns), uint8 unless `then` makes something else of them."""
        packed, dim = (rows, 0) if self.along == "rows" else (columns, 1)
        is_across = self.word_bits % self.bits and not self.has_gaps
        per_word = self.word_bits // self.bits
        first_word = packed.start * self.bits // self.word_bits if is_across else packed.start // per_word
        words = slice(first_word, num_words(packed.stop, self.bits, self.word_bits, has_gaps=self.has_gaps))
        index = (words, columns) if dim == 0 else (rows, words)
        found = whole[index[1], index[0]].T if self.transposed else whole[index]
        if is_across:
            values = self._across(found, dim, packed, words.start)
        else:
            first = packed.start - words.start * per_word
            values = self._unpacked(found.int(), dim).narrow(dim, first, packed.stop - packed.start)
        return values.to(torch.uint8) if self.then is None else self.then(values)

    def packed(self, values: Tensor) -> Tensor:
        """Pack unsigned values (rows, columns) into the stored tensor; the inverse of reading without `then`."""
        per_word, dim = self.word_bits // self.bits, 0 if self.along == "rows" else 1
        padding = [0, 0, 0, -values.shape[0] % per_word] if dim == 0 else [0, -values.shape[1] % per_word]
        padded = functional.pad(values.to(torch.int64), padding)
        num_rows, num_columns = padded.shape
        each = padded.view((-1, per_word, num_columns) if dim == 0 else (num_rows, -1, per_word))
        places = torch.tensor(self.order or range(per_word)) * self.bits
        words = (each << places.view([-1] + [1] * (1 - dim))).sum(dim + 1)
        top = 2 ** (self.word_bits - 1)
        signed: Tensor = ((words + top) % (2 * top) - top).to(torch.int32)
        return signed.T.contiguous() if self.transposed else signed

    def _across(self, words: Tensor, dim: int, packed: slice, first: int) -> Tensor:
        """The values of a range, whose words begin with the first: each is cut out of the two words that have it."""
        first_bit = torch.arange(packed.start, packed.stop, device=words.device) * self.bits - first * self.word_bits
        word, place = first_bit // self.word_bits, first_bit % self.word_bits
        unsigned = words.long() & (1 << self.word_bits) - 1
        low, high = (unsigned.index_select(dim, (word + more).clamp(max=words.shape[dim] - 1)) for more in (0, 1))
        both = (low | high << self.word_bits) >> place.view([-1] + [1] * (1 - dim))
        values: Tensor = (both & (1 << self.bits) - 1).int()
        return values

    def _unpacked(self, words: Tensor, dim: int) -> Tensor:
        per_word = self.word_bits // self.bits
        places = torch.tensor(self.order or range(per_word), dtype=torch.int32, device=words.device)
        values = (words.unsqueeze(dim + 1) >> (places * self.bits).view([-1] + [1] * (1 - dim))) & (2**self.bits - 1)
        together: Tensor = values.flatten(dim, dim + 1)
        return together


def num_words(count: int, bits: int, word_bits: int = 32, *, has_gaps: bool = False) -> int:
    """Number of words that `count` values of `bits` bits take. has_gaps: see PackedRead."""
    if has_gaps:
        return -(-count // (word_bits // bits))
    return -(-count * bits // word_bits)


def widened_codes(bits: int) -> Callable[[Tensor], Tensor] | None:
    """A function that turns codes of `bits` bits, the lower half of them negative, into values of a ScaledMatrix.

    None for 4 bits, which need no change. Codes of fewer bits become INT4, codes of more bits INT8.
    """
    if bits == 4:
        return None
    half, dtype = 2 ** (bits - 1), torch.uint8 if bits < 4 else torch.int8
    return lambda values: (values - half + (HALF_INT4 if bits < 4 else 0)).to(dtype)
