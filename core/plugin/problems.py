"""The problem of a plugin, as data: its name, where it failed, why, and which names it wanted to register."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from itertools import dropwhile
from pathlib import Path
from types import CodeType, FrameType

from hookline.core.contracts.hooks import PROJECT
from hookline.core.errors import one_short_line

_IMPORT_CODE = "<frozen importlib"
_CORE = __name__.rpartition(".plugin.")[0]
_SITE = {"site-packages", "dist-packages"}
"""Folders that distributions are installed in."""


class Phase(Enum):
    """Where a plugin failed."""

    BLOCK = "block"
    IMPORT = "import"
    VERSION = "version"
    HOOKS = "hooks"
    REGISTER = "register"
    PRESETS = "presets"


@dataclass(frozen=True)
class Problem:
    """Why a plugin is not used: its name, where it comes from, the cause in one line, and the entries it wanted."""

    plugin: str
    distribution: str
    version: str
    stage: Phase
    cause: str
    wanted: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"plugin '{self.plugin}' ({self.distribution} {self.version}): {self.cause}"


class Rejected(Exception):
    """The first fault of a plugin; the host turns it into a Problem."""

    def __init__(self, stage: Phase, cause: str, wanted: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(cause)
        self.stage = stage
        self.cause = cause
        self.wanted = wanted


def raised_at(error: BaseException, *, is_import: bool = False) -> tuple[CodeType, int] | None:
    """The code and the line where an error was raised: the innermost that is neither a library's nor core's, if any.

    is_import: see `with_line`.
    """
    places = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if is_import:
        places = list(dropwhile(lambda place: not _is_import(place[0]), places))
    reached = [place for place in places if not _is_import(place[0])]
    if not reached:
        return None
    own = [place for place in reached if not _is_library(place[0])]
    frame, line = (own or reached)[-1]
    return frame.f_code, line


def with_line(error: BaseException, *, is_import: bool = False) -> str:
    """An error in one short line, with the file's name and the line where it was raised.

    Without the folder, so that processes on several hosts report the same text and clients of a server do not learn it.
    is_import: the error occurred in an import; it has a line only if a module's code was reached.
    """
    place = raised_at(error, is_import=is_import)
    return one_short_line(error) + (f" ({Path(place[0].co_filename).name}:{place[1]})" if place is not None else "")


def _is_import(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_IMPORT_CODE)


def _is_library(frame: FrameType) -> bool:
    """Whether a frame's code is of Python, core, a distribution that brings no plugin, or generated."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    top = module.partition(".")[0]
    if file.startswith("<") or top in sys.stdlib_module_names or f"{module}.".startswith(f"{_CORE}."):
        return True
    return not _SITE.isdisjoint(Path(file).parts) and top not in _plugin_packages()


@cache
def _plugin_packages() -> frozenset[str]:
    """Top-level modules of the installed distributions that bring plugins."""
    return frozenset(point.module.partition(".")[0] for point in entry_points(group=PROJECT))
