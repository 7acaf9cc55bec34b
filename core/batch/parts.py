"""The files of a batch over folders, cut into parts: batch.part_rows rows each, answered and written together.

A part's number and beginning follow from its file and `batch.part_rows` alone, so that a later run knows what is done.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.core.batch.rows import Line, lines_of
from hookline.core.errors import ConfigError, one_short_line

if TYPE_CHECKING:
    import pyarrow

NO_GROUP = -1
JSONL, PARQUET = SUFFIXES = (".jsonl", ".parquet")
MAX_GROUP_BYTES = 2**32
"""Most memory for a row group of a parquet file, read whole: few bytes of a file can stand for any number of rows."""
MAX_ROWS = 2**31
"""Most rows that a parquet file may say it has."""
ROWS_AT_ONCE = 2**16
"""Rows of a group that are decoded between two looks at its memory, at most."""


@dataclass(frozen=True)
class Part:
    """Rows of a file. file: relative to the input folder. start: a byte of JSONL, or a row of a parquet's row group.

    first: lines or rows of the file before it. group: the row group; NO_GROUP for JSONL and a parquet without rows.
    """

    file: str
    number: int
    start: int
    first: int
    num_rows: int
    group: int = NO_GROUP


@dataclass(frozen=True)
class Source:
    """A file and its parts. fingerprint: of what is in it."""

    file: str
    parts: tuple[Part, ...]
    fingerprint: str

    @property
    def num_rows(self) -> int:
        """Of all parts."""
        return sum(part.num_rows for part in self.parts)


def files_in(folder: Path) -> list[str]:
    """The JSONL and parquet files below a folder, relative to it, without hidden ones.

    Raises: ConfigError if there is none.
    """
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    files = sorted(path.as_posix() for path in found if not any(name.startswith(".") for name in path.parts))
    if not files:
        raise ConfigError(f"{folder} holds no file that ends in {' or '.join(SUFFIXES)}")
    return files


def source_of(folder: Path, file: str, part_rows: int) -> Source:
    """A file, looked through. Raises: ConfigError if it cannot be read."""
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
    """Rows of all groups; -1 if one has a negative number."""
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return -1 if min(rows, default=0) < 0 else sum(rows)


def parquet_file(path: Path) -> pyarrow.parquet.ParquetFile:
    """A parquet file, its end read. Raises: ConfigError if it is none, or pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f'{path} needs pyarrow: pip install "hookline[parquet]"') from error
    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is no parquet file: {one_short_line(error)}") from error


def lines_of_part(folder: Path, part: Part) -> Iterator[Line]:
    """The lines of a part of a JSONL file, with their numbers in the file. Raises: ConfigError if some are gone."""
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
    """The tables of parts of parquet files; the last row group is kept, since the next part is likely of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: tuple[str, int] | None = None
        self._table: pyarrow.Table = None

    def table_of(self, part: Part) -> pyarrow.Table:
        """A part's rows with all their columns.

        Raises: ConfigError if the file is damaged or was changed.
        """
        if self._kept != (part.file, part.group):
            self._table = self._read(part)
            self._kept = (part.file, part.group)
        found = self._table.slice(part.start, part.num_rows)
        _check_unchanged(self._folder, part, found.num_rows)
        return found

    def _read(self, part: Part) -> pyarrow.Table:
        import pyarrow as pa

        path = self._folder / part.file
        file = parquet_file(path)
        try:
            if part.group == NO_GROUP:
                return file.schema_arrow.empty_table()
            table = _group_table(file, part.group, path)
            table.validate()  # but for texts: one that is not UTF-8 is its row's error, not the file's
        except (pa.ArrowException, OSError, IndexError) as error:
            raise ConfigError(f"row group {part.group} of {path} cannot be read: {one_short_line(error)}") from error
        return table


def _group_table(file: pyarrow.parquet.ParquetFile, group: int, path: Path) -> pyarrow.Table:
    """A row group, a few rows at a time. Raises: ConfigError if it takes too much memory."""
    import pyarrow as pa

    metadata = file.metadata.row_group(group)
    # No value is larger than its column: so few rows of it do not take more than all may.
    sizes = [metadata.column(column).total_uncompressed_size for column in range(metadata.num_columns)]
    at_once = max(1, min(ROWS_AT_ONCE, MAX_GROUP_BYTES // max(1, *sizes)))
    batches, num_bytes = [], 0
    for batch in file.iter_batches(batch_size=at_once, row_groups=[group]):
        num_bytes += batch.nbytes
        if num_bytes > MAX_GROUP_BYTES:
            raise ConfigError(
                f"row group {group} of {path} takes more than {MAX_GROUP_BYTES} bytes of memory; write the file with "
                "fewer rows in a group"
            )
        batches.append(batch)
    return pa.Table.from_batches(batches, file.schema_arrow)
