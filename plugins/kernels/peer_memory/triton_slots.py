"""How rows lie in the memory that ranks share: words that arrive by themselves, and tiles sent from within a product.

A place that nothing has arrived at holds all ones, a NaN that is never sent, so a program that waits looks at the
data themselves; triton_sums.py says why that suffices. A word is a pair of columns, or one of float32.
Legend: T rows, O columns, R ranks.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hookline.core.contracts import HEADER_BYTES, NUM_COPIES, PeerMemory

WORD_BYTES = 4
"""Bytes that arrive at once, and that a rank that waits looks at together."""
PART_MULTIPLE = 4
"""A part has a multiple of this many words, so that each begins at a multiple of 16 bytes."""
RANKS_AT_ONCE, MOST_ROWS_AT_ONCE = 2, 128
"""Limits of sums at once; beyond them each rank sums up a part. Measured: docs/log."""
LEAST_ROWS_BY_ROWS = {2: 129, 4: 256}
"""Ranks -> fewest rows of sums by rows, where a rank may keep its own rows alone. Measured: docs/log."""


class Way(Enum):
    """How rows are summed up if each rank needs them whole, see triton_sums.py."""

    AT_ONCE = "once"
    BY_PARTS = "parts"

    @classmethod
    def of(cls, num_ranks: int, num_rows: int) -> Way:
        """The faster one."""
        return cls.AT_ONCE if num_ranks <= RANKS_AT_ONCE and num_rows <= MOST_ROWS_AT_ONCE else cls.BY_PARTS


def sums_by_rows(num_ranks: int, num_rows: int) -> bool:
    """Whether sums by rows are faster, for which a rank keeps only its own rows of the residual."""
    return num_ranks in LEAST_ROWS_BY_ROWS and num_rows >= LEAST_ROWS_BY_ROWS[num_ranks]


def part_words(num_words: int, num_ranks: int) -> int:
    """Words of a row that each rank sums up; the last ranks' may be fewer, or none."""
    share = -(-num_words // num_ranks)
    return -(-share // PART_MULTIPLE) * PART_MULTIPLE


@dataclass(frozen=True)
class Sends:
    """Where the tiles of a product go instead of to an output: to the ranks that will sum them up."""

    peers: PeerMemory
    way: Way

    def part(self, num_out: int) -> int:
        """Words of each rank's part of `num_out` columns of 16 bits; 0 if rows are summed up at once."""
        return part_words(num_out // 2, self.peers.size) if self.way is Way.BY_PARTS else 0

    def takes(self, num_out: int, block_o: int) -> bool:
        """Whether each tile of `block_o` columns of 16 bits, of `num_out` in all, goes to a single rank."""
        return num_out % block_o == 0 and self.part(num_out) * 2 % block_o == 0


def place_arguments(peers: PeerMemory) -> tuple[Tensor, Tensor, int]:
    """A kernel's arguments `addresses, counts, rank`."""
    return peers.addresses_R, peers.counts_S, peers.rank


def place_constants(peers: PeerMemory) -> dict[str, int]:
    """Compile-time constants of a kernel that calls `place`."""
    return {"SIZE": peers.size, "SLOT_BYTES": peers.slot_bytes}


def sending_arguments(sends: Sends | None, unused: Tensor) -> tuple[Tensor, Tensor, int]:
    """A product's arguments `addresses, counts, rank`; a product that sends nothing gets `unused` for both tensors."""
    return (unused, unused, 0) if sends is None else place_arguments(sends.peers)


def sending_constants(sends: Sends | None, num_out: int) -> dict[str, Any]:
    """Compile-time constants of a product that calls `send_tile`."""
    if sends is None:
        return {"SEND": False, "SIZE": 1, "SLOT_BYTES": 0, "PART": 0}
    return {"SEND": True, "PART": sends.part(num_out), **place_constants(sends.peers)}


@triton.jit
def offset_of(slot, count, source, SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr):
    """The offset of a source's data in a slot, in any rank's memory, for this count. Source SIZE: sums of owners."""
    HEADER: tl.constexpr = 128  # not globals: docs/plugins.md#kernels-in-triton
    COPIES: tl.constexpr = 2
    return HEADER + ((slot * COPIES + count % COPIES) * (SIZE + 1) + source) * SLOT_BYTES


assert (HEADER_BYTES, NUM_COPIES) == (128, 2), "offset_of has the same numbers"


@triton.jit
def place(addresses, peer, slot, count, source, word: tl.constexpr, SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr):
    """The same in this peer's memory, as a pointer to such words."""
    at = offset_of(slot, count, source, SIZE, SLOT_BYTES)
    return tl.multiple_of((tl.load(addresses + peer) + at).to(tl.pointer_type(word)), 16)


@triton.jit
def go_at_of(addresses, rank):
    """Where it is noted that this rank is let go, see PeerMemory."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def must_wait(is_missing, go_at):
    """Whether anything is missing, unless this rank was let go."""
    let_go = tl.load(go_at, volatile=True)
    return (tl.max(is_missing.to(tl.int32)) != 0) & (let_go == 0)


@triton.jit
def as_words(pointer):
    """A pointer to the same place, as one to words."""
    return pointer.to(tl.pointer_type(tl.int32))


@triton.jit
def sendable(words):
    """The same numbers, with another NaN in place of the all-ones NaN, which marks an empty slot."""
    return tl.where(words == -1, -0x8001, words)


@triton.jit
def low_of(words, dtype: tl.constexpr):
    """The first (or only) column of each word, as float32."""
    if dtype == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return words.to(tl.float32, bitcast=True)


@triton.jit
def high_of(words, dtype: tl.constexpr):
    """The second column of each word as float32, or zeros."""
    if dtype == tl.bfloat16:
        return (words & -0x10000).to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (words & 0).to(tl.float32)


@triton.jit
def pack(first, second, dtype: tl.constexpr):
    """Words from their two columns, the inverse of `low_of` and `high_of`."""
    if dtype == tl.float32:
        return first.to(tl.int32, bitcast=True)
    else:
        bits = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return bits | (second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def send_tile(
    tile, first_out, row, num_rows, addresses, counts, rank, dtype: tl.constexpr, SIZE: tl.constexpr,
    SLOT_BYTES: tl.constexpr, PART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Send a float32 tile (BLOCK_T, BLOCK_O) to the rank that sums up its columns, or to all ranks if PART is 0.

    It goes to the place of this rank's data, on this rank too, in its row's slot.
    """
    WORDS: tl.constexpr = BLOCK_O // 2
    first, second = tl.split(tl.reshape(tile, (BLOCK_T, WORDS, 2)))
    words = sendable(pack(first, second, dtype))
    is_row = row < num_rows
    count = tl.load(counts + row, mask=is_row, other=0)
    to_place = offset_of(row.to(tl.int64), count, rank, SIZE, SLOT_BYTES)
    first_word = first_out // 2
    if PART:
        owner = first_word // PART
        _store_words(addresses, owner, to_place, first_word - owner * PART, words, is_row, WORDS)
    else:
        for step in tl.static_range(SIZE):
            _store_words(addresses, (rank + step) % SIZE, to_place, first_word, words, is_row, WORDS)


@triton.jit
def _store_words(addresses, peer, to_place, first_word, words, is_row, WORDS: tl.constexpr):
    """Store rows of words in a peer's memory, from this word of each row's place on, a multiple of WORDS."""
    start = tl.multiple_of(first_word, WORDS)
    places = (tl.load(addresses + peer) + to_place)[:, None].to(tl.pointer_type(tl.int32))
    places = tl.multiple_of(places, (16, 16)) + (start + tl.arange(0, WORDS))[None, :]
    tl.store(places, words, mask=is_row[:, None])
