"""Compiled kernels that `hookline warm export=FOLDER` wrote: Triton looks for them before it looks into its own cache.

Triton's own cache names its files by absolute paths and is written to. An export can lie at any path, be read-only, and
be read by several processes at once. It has a folder for each of Triton's keys, with the kernel's binary and metadata
or a launcher; the stamps of `core.assembly.kernel_build`; and MANIFEST. This module imports neither torch nor Triton
before it is asked to put an export to use.
"""

from __future__ import annotations

import json
import logging
import sysconfig
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
GROUP = "__grp__"
"""Triton lists the files of a kernel in a JSON file whose name begins with this."""
logger = logging.getLogger("hookline")


def compiler_versions() -> dict[str, str]:
    """The versions that Triton's cache keys and launchers depend on: Triton's, and Python's with its platform."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return {"triton": triton, "python": str(sysconfig.get_config_var("EXT_SUFFIX")).strip(".").removesuffix(".so")}


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of an export; None if there is none that can be read."""
    with suppress(OSError, ValueError):
        found: Any = json.loads((folder / MANIFEST).read_text())
        if isinstance(found, dict) and isinstance(found.get("versions"), dict):
            return found
    return None


def misfit_of(folder: Path) -> str | None:
    """The reason why Triton here can use no kernel of this folder; None if it may, or if the folder is empty."""
    manifest = manifest_of(folder)
    if manifest is None:
        with suppress(OSError):
            if folder.is_dir() and not any(folder.iterdir()):
                return None
        return f"there is no {MANIFEST} in it that can be read" if folder.is_dir() else "there is no such folder"
    here = compiler_versions()
    there = manifest["versions"]
    others = [name for name in here if there.get(name) != here[name]]
    told = (" and ".join(f"{name} {versions.get(name)}" for name in others) for versions in (there, here))
    return "it was made with {}, here is {}".format(*told) if others else None


def fitting(folder: str | None) -> Path | None:
    """The folder as a path, if Triton may find kernels in it here; else None."""
    if folder is None or misfit_of(Path(folder)) is not None or manifest_of(Path(folder)) is None:
        return None
    return Path(folder).absolute()


def in_export(folder: str | None, stamp: Path) -> Path:
    """The stamp of the same name in an export that fits; where it has none, the given one."""
    path = fitting(folder)
    return path / stamp.name if path is not None and (path / stamp.name).is_file() else stamp


def use_exported(folder: str | None) -> None:
    """Make Triton look for kernels in this export before its own cache, in this process and in those forked from it.

    An export that does not fit, or is not there, is left out with one line in the log.
    """
    if folder is None:
        return
    path = fitting(folder)
    if path is not None:
        _look_in(path)
    elif (why := misfit_of(Path(folder))) is not None:
        logger.warning("engine.kernel_cache=%s is left out: %s", folder, why)


_IN_USE: dict[Path, None] = {}
"""The exports that Triton looks into in this process. A key names what a kernel is made of, so each may serve all."""
_REPLACED: set[str] = set()
"""Cache keys whose kernels this process has compiled again, because the export's files could not be loaded here."""


def _look_in(path: Path) -> None:
    from triton import knobs
    from triton.runtime.cache import CacheManager, FileCacheManager

    _IN_USE[path] = None
    ordinary: Any = knobs.cache.manager_class or FileCacheManager
    if getattr(ordinary, "is_hooklines", False):
        return

    class _ExportsFirst(CacheManager):  # type: ignore[misc]
        """The files of a key: an export's, if one has the key, else the ordinary cache manager's."""

        is_hooklines = True

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            given = () if override or dump or key in _REPLACED else tuple(_IN_USE)
            self._folders = [place / key for place in given if (place / key).is_dir()]
            self._key, self._how = key, (key, override, dump)
            self._made: Any = None

        @property
        def _own(self) -> Any:
            """Triton's ordinary cache manager, constructed when first needed, since that creates a folder."""
            if self._made is None:
                self._made = ordinary(*self._how)
            return self._made

        def get_file(self, filename: str) -> str | None:
            for folder in self._folders:
                if (folder / filename).is_file():
                    return str(folder / filename)
            found: str | None = self._own.get_file(filename)
            return found

        def get_group(self, filename: str) -> dict[str, str] | None:
            for folder in self._folders:
                with suppress(OSError, ValueError):
                    names = json.loads((folder / f"{GROUP}{filename}").read_text())
                    group = {name: str(folder / name) for name in names}
                    if all(Path(file).is_file() for file in group.values()):
                        return group
            found: dict[str, str] | None = self._own.get_group(filename)
            return found

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            _REPLACED.add(self._key)
            self._folders = []
            return str(self._own.put(data, filename, binary=binary))

        def put_group(self, filename: str, group: dict[str, str]) -> Any:
            return self._own.put_group(filename, group)

    knobs.cache.manager_class = _ExportsFirst
