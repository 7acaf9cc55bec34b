"""The output folder of a batch: finished parts while it runs, then a file for each file of the input.

A part is written under another name and renamed when it is complete; so is a file when all its parts are there.
Therefore a row has one answer or none, whichever process dies when, and however often a part is answered. A hidden
folder beside the files has the parts, a lock, and a description of the input.
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
    """The output folder of a batch. Several processes may write parts; one process at a time joins parts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._work = folder, folder / WORK

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other batches.

        Raises: ConfigError if another batch has the lock, or the folder cannot be written to.
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
        """Whether a batch has locked the folder, as any process that sees the folder finds out."""
        try:
            # List the folder, since a network file system caches for a while that a name does not exist.
            return WORK in os.listdir(self.folder)
        except OSError:
            return False

    def agree(self, sources: Sequence[Source], settings: Mapping[str, Any]) -> None:
        """Write the description of the input. Since an earlier run, files may have been added, but not changed.

        settings: settings of `batch`, by name, which must be the same in all runs, because parts of one file may come
        from several runs.
        Raises: ConfigError if a file was changed or divided differently, or a setting differs.
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
        """Refuse to overwrite files that no batch has written.

        Raises: ConfigError naming the first.
        """
        known = (self._known() or {"files": {}})["files"]
        for file in files:
            if file not in known and (self.folder / file).exists():
                raise ConfigError(f"{self.folder / file} is there, and no batch wrote it: {shown(file)}; move it away")

    def _known(self) -> dict[str, Any] | None:
        """The description that an earlier run wrote.

        Raises: ConfigError if it cannot be read.
        """
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
        """The parts without answers."""
        if (self.folder / source.file).exists():
            return []
        return [part for part in source.parts if not self.path_of(part).exists()]

    def num_failed(self, source: Source, prefix: str) -> int:
        """Number of failed rows among the answered ones. prefix: of the new columns of parquet."""
        whole = self.folder / source.file
        paths = [whole] if whole.exists() else filter(Path.exists, map(self.path_of, source.parts))
        count = _num_failed_rows if source.file.endswith(PARQUET) else _num_failed_lines
        return sum(count(path, prefix) for path in paths)

    def path_of(self, part: Part) -> Path:
        """The path of a part's answers."""
        return self._work / "parts" / part.file / f"{part.number:08}"

    def write(self, part: Part, answers: bytes) -> None:
        """Write the answers of a whole part.

        Raises: ConfigError if they cannot be written.
        """
        path = self.path_of(part)
        with self._naming():
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [answers], "output")

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Around code that writes to the folder.

        Raises: ConfigError for an error of the system, such as a full disk.
        """
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror or one_short_line(error)}") from error

    def count_death(self, part: Part) -> int:
        """Count an engine that died while it answered a part; returns the count of this run."""
        path = self._work / "deaths" / part.file / str(part.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b".")
        return path.stat().st_size

    def forget_deaths(self) -> None:
        """Forget the counts of an earlier run."""
        shutil.rmtree(self._work / "deaths", ignore_errors=True)

    def finish(self, source: Source) -> None:
        """Join all parts of a file in order.

        Raises: ConfigError if a part is missing, or the file cannot be written.
        """
        path, parts = self.folder / source.file, self._work / "parts" / source.file
        if not path.exists():
            # List the folder, since a network file system caches for a while that a name does not exist.
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
