"""Divides the files of a batch over folders into parts: batch.part_rows rows each, answered and written together.

The number and the beginning of a part follow from its file and `batch.part_rows` alone, so that a later run knows which
parts are done.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.core.batch.input_folder import PARQUET
from hookline.core.batch.rows import InputLine, lines_of
from hookline.core.errors import ConfigError, one_short_line

if TYPE_CHECKING:
    import pyarrow

NO_GROUP = -1
MAX_PART_BYTES = 2**32
"""Most memory for a part of a parquet file, since a few bytes of a file can represent any number of rows."""
MAX_ROWS = 2**31
"""Most rows that a parquet file may declare."""
ROWS_AT_ONCE = 2**16
"""Most rows of a row group that are decoded at once."""
READ_BYTES = 2**20
"""Bytes of a column that are read at once."""


@dataclass(frozen=True)
class Part:
    """A part. file: relative to the input folder. start: its first byte in JSONL, or its first row in a row group of
    parquet. first: lines or rows of the file before it. group: the row group; NO_GROUP for JSONL and for parquet
    without rows.
    """

    file: str
    number: int
    start: int
    first: int
    num_rows: int
    group: int = NO_GROUP


@dataclass(frozen=True)
class Source:
    """A file and its parts. fingerprint: identifies its content."""

    file: str
    parts: tuple[Part, ...]
    fingerprint: str

    @property
    def num_rows(self) -> int:
        """Number of rows in all parts."""
        return sum(part.num_rows for part in self.parts)


def source_of(folder: Path, file: str, part_rows: int) -> Source:
    """Read a file's structure, and divide it into parts.

    Raises: ConfigError if it cannot be read.
    """
    cut = _cut_parquet if file.endswith(PARQUET) else _cut_jsonl
    try:
        return cut(folder / file, file, part_rows)
    except OSError as error:
        raise ConfigError(f"{folder / file} cannot be read: {error.strerror or one_short_line(error)}") from error


def _cut_jsonl(path: Path, file: str, part_rows: int) -> Source:
    parts: list[Part] = []
    start = first = num_rows = checksum = 0

    def _cut() -> None:
        parts.append(Part(file, len(parts), start, first, num_rows))

    with path.open("rb") as opened:
        for line in lines_of(opened):
            num_rows += 1
            checksum = zlib.crc32(line.checksum.to_bytes(4), checksum)
            if num_rows == part_rows:
                _cut()
                start, first, num_rows = opened.tell(), line.number, 0
    if num_rows:
        _cut()
    return Source(file, tuple(parts), f"{path.stat().st_size}-{checksum:08x}")


def _cut_parquet(path: Path, file: str, part_rows: int) -> Source:
    metadata = parquet_file(path).metadata
    if not 0 <= metadata.num_rows <= MAX_ROWS or metadata.num_rows != _num_group_rows(metadata):
        raise ConfigError(
            f"{path} says that it has {metadata.num_rows} rows; it must be the sum of its groups, at most {MAX_ROWS}"
        )
    parts: list[Part] = []
    before = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        for start in range(0, rows, part_rows):
            parts.append(Part(file, len(parts), start, before + start, min(part_rows, rows - start), group))
        before += rows
    if not parts:  # a part without rows, so that the output has the columns
        parts.append(Part(file, 0, 0, 0, 0, NO_GROUP))
    with path.open("rb") as opened:
        size = path.stat().st_size
        opened.seek(max(0, size - 2**20))
        return Source(file, tuple(parts), f"{size}-{zlib.crc32(opened.read()):08x}")


def _num_group_rows(metadata: Any) -> int:
    """Number of rows in all row groups; -1 if a group declares a negative number."""
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return -1 if min(rows, default=0) < 0 else sum(rows)


def parquet_file(path: Path) -> pyarrow.parquet.ParquetFile:
    """Open a parquet file and read its footer.

    Raises: ConfigError if it is not parquet, has a name that pyarrow cannot open, or pyarrow is missing.
    """
    check_parquet_name(path)
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f'{path} needs pyarrow: pip install "hookline[parquet]"') from error
    try:
        return pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is no parquet file: {one_short_line(error)}") from error


def check_parquet_name(path: Path) -> None:
    """Refuse a name that pyarrow cannot open. Raises: ConfigError naming it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path} has a name that is not UTF-8, and no parquet file may have one; rename it") from None


def lines_of_part(folder: Path, part: Part) -> Iterator[InputLine]:
    """The lines of a part of a JSONL file, with their numbers in the file.

    Raises: ConfigError if lines are missing.
    """
    num_lines = 0
    with (folder / part.file).open("rb") as opened:
        opened.seek(part.start)
        for line in islice(lines_of(opened, part.first), part.num_rows):
            num_lines += 1
            yield line
    _check_unchanged(folder, part, num_lines)


def _check_unchanged(folder: Path, part: Part, num_rows: int) -> None:
    if num_rows != part.num_rows:
        raise ConfigError(
            f"{folder / part.file} was changed while it was read: part {part.number} had {part.num_rows} rows and has "
            f"{num_rows}; leave the input alone, and take another output"
        )


class PartTables:
    """Reads parts of parquet files as tables on demand.

    Consecutive parts of a row group are read in one pass, others from the group's beginning. Holds at most one part and
    the rows that were decoded with its last rows.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place: tuple[str, int] | None = None
        self._rows: _GroupRows | None = None

    def table_of(self, part: Part) -> pyarrow.Table:
        """A part's rows with all their columns.

        Raises: ConfigError if the file is damaged or was changed, or if the part takes too much memory.
        """
        import pyarrow as pa

        path = self._folder / part.file
        try:
            if part.group == NO_GROUP:
                return parquet_file(path).schema_arrow.empty_table()
            rows, self._rows = self._rows, None  # the next part continues here unless this one fails
            if rows is None or rows.next_row > part.start or self._place != (part.file, part.group):
                rows = _GroupRows(path, part.group)
            found = rows.table(part.start, part.num_rows)
            found.validate()  # except texts: invalid UTF-8 is an error of its row, not of the file
        except (pa.ArrowException, OSError, IndexError) as error:
            raise ConfigError(f"row group {part.group} of {path} cannot be read: {one_short_line(error)}") from error
        _check_unchanged(self._folder, part, found.num_rows)
        self._rows, self._place = rows, (part.file, part.group)
        return found


class _GroupRows:
    """The rows of a row group in their order, decoded a few at a time. next_row: which one comes next."""

    def __init__(self, path: Path, group: int) -> None:
        self._path, self.next_row = path, 0
        file = parquet_file(path)
        metadata = file.metadata.row_group(group)
        # No value is larger than its whole column, which bounds the memory of so few rows.
        sizes = [metadata.column(column).total_uncompressed_size for column in range(metadata.num_columns)]
        at_once = max(1, min(ROWS_AT_ONCE, MAX_PART_BYTES // max(1, *sizes)))
        self._schema = file.schema_arrow
        self._batches = file.iter_batches(batch_size=at_once, row_groups=[group])
        self._left: pyarrow.RecordBatch | None = None

    def table(self, start: int, num_rows: int) -> pyarrow.Table:
        """At most `num_rows` rows from `start` on, which must not be before next_row; fewer if the group ends.

        Raises: ConfigError if they take too much memory.
        """
        import pyarrow as pa

        end, kept, num_bytes = start + num_rows, [], 0
        while self.next_row < end and (batch := self._next()) is not None:
            num_passed = min(max(0, start - self.next_row), batch.num_rows)
            num_taken = min(end - self.next_row, batch.num_rows)
            found = batch.slice(num_passed, num_taken - num_passed)
            num_bytes += found.nbytes
            if num_bytes > MAX_PART_BYTES:
                raise ConfigError(
                    f"rows {start + 1} to {end} of a row group of {self._path} take more than {MAX_PART_BYTES} bytes "
                    "of memory; give a smaller batch.part_rows and another output"
                )
            if found.num_rows:
                kept.append(found)
            self.next_row += num_taken
            self._left = batch.slice(num_taken) if num_taken < batch.num_rows else None
        return pa.Table.from_batches(kept, self._schema)

    def _next(self) -> pyarrow.RecordBatch | None:
        return next(self._batches, None) if self._left is None else self._left
