"""What a batch takes, beside the keys of an engine: the dataclass of the root keys, and their checks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.core.config.schema import build, check_keys
from hookline.core.config.settings import ENGINE_KEYS, Config, EngineKeys, validate
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.serve.settings import ServeConfig
from hookline.core.util.ranges import bounded, check_ranges

USAGE = "usage: hookline batch INPUT.jsonl OUTPUT.jsonl [option=name | key=value] ..."
AHEAD = 1.1
"""Rows in flight over the most that run: some wait, so that a place that gets free is taken at once."""


@dataclass(frozen=True)
class BatchConfig:
    """How the rows of a file are answered.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    names: tuple[str, ...] = ()
    """What rows may call the model; none: the checkpoint's reference."""
    max_rows: int | None = bounded(None, 1)
    """Rows in flight; None: a tenth more than engine.max_num_seqs."""
    timeout_s: float | None = bounded(None, above=0)
    """Longest that a row may take, in seconds; None: no limit."""
    reasoning_parser: Any = None
    """Who tells reasoning from the answer in chats, as serve.reasoning_parser."""
    tool_parser: Any = None
    """Who finds tool calls in the answers of chats with tools, as serve.tool_parser."""

    def __post_init__(self) -> None:
        check_ranges(BatchConfig, vars(self), "batch")


@dataclass(frozen=True)
class BatchKeys(EngineKeys):
    """Root keys of a batch, beside the kinds."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """How the rows of the file are answered."""


@dataclass(frozen=True)
class BatchRun:
    """A validated batch. max_rows: in flight."""

    input: Path
    output: Path
    config: Config
    serve: ServeConfig
    max_rows: int


def split_files(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The file names among the arguments, and the rest for Hydra: a name is what is neither key=value nor a flag's.

    Raises: ConfigError for a flag that does not exist.
    """
    from hookline.core.config.compose import flags_and_pairs

    flags, pairs = flags_and_pairs(arguments)
    names = [one for one in pairs if "=" not in one and not one.startswith("~")]
    return names, [*flags, *(one for one in pairs if one not in names)]


def validate_batch(files: list[str], tree: Mapping[str, Any], host: PluginHost) -> BatchRun:
    """Check a composed tree and the two files.

    Raises: ConfigError or PluginError naming the key, the value and the fix.
    """
    if len(files) != 2:
        raise ConfigError(f"a batch has two files, and {len(files)} are given: {USAGE}")
    check_keys(tree, (*ENGINE_KEYS, "batch"))
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    batch: BatchConfig = build(BatchConfig, tree.get("batch") or {}, "batch")
    max_rows = batch.max_rows or math.ceil(AHEAD * config.engine.max_num_seqs)
    serve = ServeConfig(
        names=tuple(batch.names),
        timeout_s=batch.timeout_s,
        reasoning_parser=batch.reasoning_parser,
        tool_parser=batch.tool_parser,
    )
    return BatchRun(_input(Path(files[0])), _output(Path(files[1]), Path(files[0])), config, serve, max_rows)


def _input(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path} is not there; give the file with the requests first")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path} cannot be read")
    return path


def _output(path: Path, input: Path) -> Path:
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: give a file in a folder that is there")
    if path.exists() and path.samefile(input):
        raise ConfigError(f"{path} is the input; give another file for the answers")
    return path
