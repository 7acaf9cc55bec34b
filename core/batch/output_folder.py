"""The output of a batch over folders: finished parts while it runs, then one file for each file of the input.

A part is written under another name and renamed when it is whole, and so is a file when all its parts are there. So a
row has one answer or none, whichever process dies when, and however often a part is answered. Beside the files lies a
hidden folder with the parts, a lock, and a note of what the input was.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hookline.core.batch.input_folder import PARQUET
from hookline.core.batch.parts import Part, Source, parquet_file
from hookline.core.batch.rows import has_failed
from hookline.core.errors import ConfigError, one_short_line, shown
from hookline.core.util.files import write_whole

WORK = ".hookline"
FORMAT = 1


class OutputFolder:
    """Where the answers of a folder go. Several processes may write parts; one at a time makes files of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._work = folder, folder / WORK

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other batches out.

        Raises: ConfigError if one is at work, or the folder cannot be written.
        """
        with self._naming():
            self._work.mkdir(parents=True, exist_ok=True)
            file = (self._work / "lock").open("wb")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"{self.folder} is being written by another batch; wait, or take another") from error
            yield

    @property
    def is_begun(self) -> bool:
        """Whether a batch works here, as any process that sees the folder finds."""
        try:
            # The folder's list, not the name: a network file system remembers for a while that a name was not there.
            return WORK in os.listdir(self.folder)
        except OSError:
            return False

    def agree(self, sources: Sequence[Source], settings: Mapping[str, Any]) -> None:
        """Note what the input is. Since an earlier run, files may have been added to it, and nothing else changed.

        settings: of `batch`, by name, that must be the same in all runs, since parts of one file come of several.
        Raises: ConfigError if a file was changed or cut otherwise, or a setting is another one.
        """
        known = self._known() or {"files": {}}
        for name, value in settings.items():
            if (before := known.setdefault(name, value)) != value:
                raise ConfigError(
                    f"batch.{name}={shown(value)}, and {self.folder} was begun with {shown(before)}; give that, or "
                    "take another output"
                )
        for source in sources:
            if known["files"].setdefault(source.file, source.fingerprint) != source.fingerprint:
                raise ConfigError(f"{source.file} was changed since {self.folder} was begun; take another output")
        noted = {**known, "format": FORMAT}
        write_whole(self._work / "batch.json", [json.dumps(noted, indent=1)], "output")

    def check_free(self, files: Iterable[str]) -> None:
        """Refuse to go over files that no batch wrote. Raises: ConfigError naming the first."""
        known = (self._known() or {"files": {}})["files"]
        for file in files:
            if file not in known and (self.folder / file).exists():
                raise ConfigError(f"{self.folder / file} is there, and no batch wrote it: {shown(file)}; move it away")

    def _known(self) -> dict[str, Any] | None:
        """What an earlier run noted. Raises: ConfigError if that cannot be read."""
        path = self._work / "batch.json"
        if not path.exists():
            return None
        try:
            known = json.loads(path.read_bytes())
            if isinstance(known["part_rows"], int) and isinstance(known["files"], dict):
                return dict(known)
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            pass
        raise ConfigError(f"{path} is damaged; it says what {self.folder} is made of, so take another output")

    def left(self, source: Source) -> list[Part]:
        """The parts that are not answered yet."""
        if (self.folder / source.file).exists():
            return []
        return [part for part in source.parts if not self.path_of(part).exists()]

    def num_failed(self, source: Source, prefix: str) -> int:
        """How many of its rows that are answered have failed. prefix: of the new columns of parquet."""
        whole = self.folder / source.file
        paths = [whole] if whole.exists() else filter(Path.exists, map(self.path_of, source.parts))
        count = _num_failed_rows if source.file.endswith(PARQUET) else _num_failed_lines
        return sum(count(path, prefix) for path in paths)

    def path_of(self, part: Part) -> Path:
        """Of a part's answers."""
        return self._work / "parts" / part.file / f"{part.number:08}"

    def write(self, part: Part, answers: bytes) -> None:
        """Write a part's answers, whole. Raises: ConfigError if that cannot be."""
        path = self.path_of(part)
        with self._naming():
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [answers], "output")

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Around code that writes. Raises: ConfigError for what the system reports, a full disk for instance."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror or one_short_line(error)}") from error

    def count_death(self, part: Part) -> int:
        """Note that an engine ended while it answered a part; returns how many have, in this run."""
        path = self._work / "deaths" / part.file / str(part.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b".")
        return path.stat().st_size

    def forget_deaths(self) -> None:
        """Those of an earlier run do not count."""
        shutil.rmtree(self._work / "deaths", ignore_errors=True)

    def finish(self, source: Source) -> None:
        """Make a file of its parts, which must all be there, in their order.

        Raises: ConfigError if one is missing, or the file cannot be written.
        """
        path, parts = self.folder / source.file, self._work / "parts" / source.file
        if not path.exists():
            # The folder's list, not each name: a network file system remembers for a while that a name was not there.
            there = set(os.listdir(parts)) if parts.is_dir() else set()
            for part in source.parts:
                if self.path_of(part).name not in there:
                    raise ConfigError(
                        f"{self.path_of(part)} was written and is not here: input and output must lie on a file system "
                        "that all nodes share"
                    )
            with self._naming():
                path.parent.mkdir(parents=True, exist_ok=True)
                whole = self._work / "whole"
                (_join_parquet if source.file.endswith(PARQUET) else _join_lines)(
                    whole, [self.path_of(part) for part in source.parts]
                )
                os.replace(whole, path)
        shutil.rmtree(parts, ignore_errors=True)


def _num_failed_lines(path: Path, prefix: str) -> int:
    with path.open("rb") as file:
        return sum(map(has_failed, file))


def _num_failed_rows(path: Path, prefix: str) -> int:
    file, column = parquet_file(path), f"{prefix}error"
    if column not in file.schema_arrow.names:
        return 0
    errors = file.read(columns=[column])
    return int(errors.num_rows - errors.column(0).null_count)


def _join_lines(whole: Path, parts: Sequence[Path]) -> None:
    with whole.open("wb") as file:
        for path in parts:
            with path.open("rb") as part:
                shutil.copyfileobj(part, file, 2**20)


def _join_parquet(whole: Path, parts: Sequence[Path]) -> None:
    import pyarrow.parquet as pq

    writer = None
    try:
        for path in parts:
            table = pq.read_table(path, partitioning=None)
            writer = writer or pq.ParquetWriter(whole, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
