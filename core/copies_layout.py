"""How the memory is laid out that each rank shares for sums by copies: offsets in bytes, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from core.rows import MOST_CHUNKS

WORD_BYTES = 4


@dataclass(frozen=True)
class Layout:
    """A rank's memory: a signal for each chunk, of each kind, from each rank; then partials, then results.

    Rows are counted with each chunk rounded up to R equal shares.
    """

    size: int
    num_rows: int
    row_bytes: int

    @classmethod
    def of(cls, size: int, num_tokens: int, row_bytes: int) -> Layout:
        """For steps of up to `num_tokens`."""
        return cls(size, num_tokens + MOST_CHUNKS * size, row_bytes)

    @property
    def num_signals(self) -> int:
        """Words of signals."""
        return MOST_CHUNKS * 2 * self.size

    @property
    def partials(self) -> int:
        """Where partials start, in bytes."""
        return -(-(self.num_signals + self.size) * WORD_BYTES // 512) * 512

    @property
    def results(self) -> int:
        """Where results start, in bytes."""
        return self.partials + self.num_rows * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return self.results + self.num_rows * self.row_bytes

    def partial_row(self, row: int) -> int:
        """Offset of a row of partials."""
        return self.partials + row * self.row_bytes

    def result_row(self, row: int) -> int:
        """Offset of a row of results."""
        return self.results + row * self.row_bytes

    def check_signal(self, source: int) -> int:
        """Offset of a signal for trying whether signals from a rank arrive; it has no other use."""
        return (self.num_signals + source) * WORD_BYTES

    def partial_signal(self, chunk: int, source: int) -> int:
        """Offset of the signal that a rank's partial of a chunk has come."""
        return (chunk * 2 * self.size + source) * WORD_BYTES

    def result_signal(self, chunk: int, source: int) -> int:
        """Offset of the signal that a rank's share of the result has come."""
        return ((chunk * 2 + 1) * self.size + source) * WORD_BYTES
