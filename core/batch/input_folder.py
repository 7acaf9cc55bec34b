"""The files of a batch's input folder.

Someone else may have filled the folder, so links that lead out of it are followed only if the user allows it. The
folder itself may be a link, because the user named it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hookline.core.errors import ConfigError

JSONL, PARQUET = SUFFIXES = (".jsonl", ".parquet")


def files_in(folder: Path, follows_links: bool = False) -> list[str]:
    """The JSONL and parquet files below a folder, as relative paths; hidden files do not count.

    A link to a file in the folder is a file like others. A link to one of its folders is skipped, because the files in
    it are found under their own names. follows_links: follow links out of the folder, too; each folder behind them is
    read once.
    Raises: ConfigError if there is no file, a file is not a regular one, a folder cannot be read, or a link out of the
    folder may not be followed.
    """
    files = sorted(_Walk(folder.resolve(), follows_links).files())
    if not files:
        raise ConfigError(f"{folder} holds no file that ends in {' or '.join(SUFFIXES)}")
    return files


class _Walk:
    """A search through a folder. root: its path without links."""

    def __init__(self, root: Path, follows_links: bool) -> None:
        self._root, self._follows_links = root, follows_links
        self._entered = {root}

    def files(self) -> Iterator[str]:
        """Paths relative to the root.

        Raises: ConfigError as `files_in`.
        """
        left = [self._root]
        while left:
            folder = left.pop()
            for name in _names_in(folder):
                path = folder / name
                real = _behind(path)
                if real is not None and real.is_dir():
                    if self._is_entered(path, real):
                        left.append(path)
                elif path.suffix in SUFFIXES:
                    self._check_file(path, real)
                    yield path.relative_to(self._root).as_posix()

    def _is_entered(self, path: Path, real: Path) -> bool:
        if path.is_symlink():
            if self._is_shown(real):
                return False
            self._check_inside(path, real)
        is_new = real not in self._entered
        self._entered.add(real)
        return is_new

    def _is_shown(self, real: Path) -> bool:
        """Whether a folder is the input folder or inside it, and not hidden: it is then searched anyway."""
        return real.is_relative_to(self._root) and not any(map(_is_hidden, real.relative_to(self._root).parts))

    def _check_file(self, path: Path, real: Path | None) -> None:
        if real is None:
            raise ConfigError(f"{path} is a link that leads nowhere; mend it, or take it away")
        if not real.is_file():
            raise ConfigError(f"{path} is no regular file, and only those are read; take it away")
        if path.is_symlink():
            self._check_inside(path, real)

    def _check_inside(self, path: Path, real: Path) -> None:
        if not (self._follows_links or real.is_relative_to(self._root)):
            raise ConfigError(
                f"{path} is a link out of the input folder, to {real}; if you trust whoever filled the folder, "
                "batch.follow_links=true reads what is there, else take the link away"
            )


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not _is_hidden(name))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _behind(path: Path) -> Path | None:
    """A path after following all of its links; None if a link leads nowhere."""
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):  # does not exist, or a cycle of links
        return None
