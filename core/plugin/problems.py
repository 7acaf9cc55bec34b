"""What is wrong with a plugin, as data: who it is, where it failed, why, and which names it wanted to register."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
