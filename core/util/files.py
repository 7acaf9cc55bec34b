"""Files that a command reads and writes: named by a key, tried before the work, and written whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hookline.core.errors import ConfigError

MAX_READ = 2**30
"""Most bytes of a file of prompts, of a trace, and of standard input: they are read whole."""


def path_of(value: object) -> Path:
    """The path that a key names; ~ and ~user at its beginning are home folders, which no shell expands there."""
    return Path(os.path.expanduser(str(value)))  # Path(...).expanduser() would also expand ./~, a folder's name


def read_bounded(path: Path, key: str, most: int = MAX_READ) -> bytes:
    """The bytes of a file or a pipe.

    Raises: ConfigError naming the key for more than `most` bytes, for a device, which may never end, and for a path
    that cannot be read.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise ConfigError(f"{key}={path} is neither a file nor a pipe")
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > most:
        raise ConfigError(f"{key}={path} holds more than {most} bytes, which is the most that is read; split it")
    return data


def check_writable(path: Path, key: str) -> None:
    """Find out whether `write_whole` will have a place to write to.

    Raises: ConfigError naming the key.
    """
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # fails for a name that is too long; the temporary file's name is shorter
        if path.is_dir():
            raise ConfigError(f"{key}={path} is a folder; name a file")
        if not path.parent.is_dir():
            raise ConfigError(f"{key}={path}: the folder {path.parent} does not exist; make it first")
        handle, name = _beside(path)
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written: {error.strerror or error}") from error


def write_whole(path: Path, pieces: Iterable[str | bytes], key: str) -> None:
    """Write a file, text as UTF-8; an existing file is replaced once the new one is complete.

    Raises: ConfigError naming the key if it cannot be written; an existing file is then unchanged.
    """
    name: str | None = None
    try:
        handle, name = _beside(path)
        with os.fdopen(handle, "wb") as file:
            file.writelines(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written: {error.strerror or error}") from error
    finally:
        if name is not None:
            with suppress(OSError):
                os.unlink(name)  # still there if something went wrong


def _beside(path: Path) -> tuple[int, str]:
    """A new file in the same folder, which can replace `path` atomically, with the mode of any new file.

    Not by tempfile, whose files only their owner can read; the usual mode could only be read by changing the umask of
    all threads for a moment.
    """
    while True:
        name = path.parent / f".{path.name[:100]}.{os.urandom(8).hex()}"
        try:
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), str(name)
        except FileExistsError:
            continue
