"""What is wrong with a plugin, as data: who it is, where it failed, why, and which names it wanted to register."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import dropwhile
from pathlib import Path

from hookline.core.errors import one_short_line

_IMPORT_CODE = "<frozen importlib"


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
    """The first thing wrong with a plugin; turned into a Problem by the host, never shown as it is."""

    def __init__(self, stage: Phase, cause: str, wanted: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(cause)
        self.stage = stage
        self.cause = cause
        self.wanted = wanted


def with_line(error: BaseException, *, is_import: bool = False) -> str:
    """An error in one short line, with the file's name and the line where it was raised.

    Without the folder: processes on several hosts say the same, and clients of a server need not know it. is_import:
    the error is one of an import; only a module that was reached has a line.
    """
    frames: Iterable[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    if is_import:
        frames = dropwhile(lambda frame: not frame.filename.startswith(_IMPORT_CODE), frames)
    lines = [
        f" ({Path(one.filename).name}:{one.lineno})" for one in frames if not one.filename.startswith(_IMPORT_CODE)
    ]
    return one_short_line(error) + (lines[-1] if lines else "")
