"""The keys of a batch, which are added to an engine's keys, and their checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.core.batch.rows import EXAMPLE
from hookline.core.config.schema import build, check_keys
from hookline.core.config.settings import ENGINE_KEYS, Config, EngineKeys, validate
from hookline.core.data.requests import COMPLETION, TASKS, RowReader
from hookline.core.errors import ConfigError, shown
from hookline.core.plugin.host import PluginHost
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.settings import ServeConfig
from hookline.core.util.ranges import bounded, check_ranges

USAGE = "usage: hookline batch INPUT.jsonl OUTPUT.jsonl [option=name | key=value] ..., or two folders"
HERE, ON_RAY = EXECUTORS = ("local", "ray")
"""Values of batch.executor."""
MAX_PART_ROWS = 10**6


_FILE_FLAGS = {
    "input": ("-i", "--input", "--input-file"),
    "output": ("-o", "--output", "--output-file"),
}
"""File of a batch -> the flags that name it."""


@dataclass(frozen=True)
class BatchConfig:
    """How the rows of a file are answered.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    names: tuple[str, ...] = ()
    """Names of the model in rows; none: the checkpoint's reference."""
    max_rows: int | None = bounded(None, 1)
    """Rows in flight; None: a tenth more than engine.max_num_seqs."""
    timeout_s: float | None = bounded(None, above=0)
    """Longest that a row may take, in seconds; None: no limit."""
    reasoning_parser: Any = None
    """The parser that separates reasoning from the answer in chats, as serve.reasoning_parser."""
    tool_parser: Any = None
    """The parser that finds tool calls in the answers of chats with tools, as serve.tool_parser."""
    executor: str = HERE
    """Of a folder: local, one engine in this process; ray, as many engines as batch.replicas on a Ray cluster, which
    RAY_ADDRESS names or which is started here."""
    replicas: int = bounded(1, 1)
    """Engines on the Ray cluster, each with a GPU for each of its ranks, if there are any."""
    num_cpus: float = bounded(1.0, 0)
    """CPU cores that each of them reserves on the Ray cluster."""
    part_rows: int = bounded(1000, 1, MAX_PART_ROWS)
    """Of a folder: rows that are answered and written together; a kill loses the parts in progress."""
    follow_links: bool = False
    """Of a folder: follow links in it that lead out of it, too. A link to a file inside it is always followed."""
    task: str = COMPLETION
    """Of parquet: completion (of the columns prompt or prompt_token_ids), chat (messages), structured or embeddings."""
    prefix: str = ""
    """Of parquet: goes before the names of the columns of the answers."""

    def __post_init__(self) -> None:
        check_ranges(BatchConfig, vars(self), "batch")
        if self.executor not in EXECUTORS:
            raise ConfigError(f"batch.executor={shown(self.executor)} is not one of {', '.join(EXECUTORS)}")
        if self.task not in TASKS:
            raise ConfigError(f"batch.task={shown(self.task)} is not one of {', '.join(TASKS)}")
        if self.replicas > 1 and self.executor != ON_RAY:
            raise ConfigError(f"batch.replicas={self.replicas} needs batch.executor=ray")


@dataclass(frozen=True)
class BatchKeys(EngineKeys):
    """Root keys of a batch, beside the kinds."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """How the rows of the file are answered."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Of rows in parquet, whose column `sampling` overrides it. Lines of JSONL have their parameters in their body."""


@dataclass(frozen=True)
class BatchRun:
    """A validated batch. max_rows: most rows in progress at once. Fields from part_rows on: see BatchConfig."""

    input: Path
    output: Path
    config: Config
    serve: ServeConfig
    max_rows: int
    part_rows: int = 1000
    executor: str = HERE
    replicas: int = 1
    num_cpus: float = 1.0
    follow_links: bool = False
    task: str = COMPLETION
    prefix: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        """Whether the input is a folder."""
        return self.input.is_dir()


def split_files(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The file names among the arguments, and the rest for Hydra.

    Names are the arguments without a key, and the values of -i and -o, which other servers' batch commands have.
    Raises: ConfigError for a flag that does not exist or has no value, and for a name that is given twice.
    """
    from hookline.core.config.compose import flags_and_pairs, full_keys_of
    from hookline.core.config.shorthands import is_positional

    named, others = _named_files(arguments)
    flags, pairs = flags_and_pairs(others, full_keys_of(BatchKeys))
    names = [one for one in pairs if is_positional(one)]
    if named and (names or len(named) != len(_FILE_FLAGS)):
        raise ConfigError(f"-i and -o name the two files, and both of them: {USAGE}")
    return [*named.values()] or names, [*flags, *(one for one in pairs if not is_positional(one))]


def _named_files(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The values of the flags for files, the input's first, and all other arguments."""
    found, others = dict.fromkeys(_FILE_FLAGS, ""), list[str]()
    waiting = iter(arguments)
    for argument in waiting:
        flag, equals, value = argument.partition("=")
        file = next((file for file, flags in _FILE_FLAGS.items() if flag in flags), None)
        if file is None:
            others.append(argument)
            continue
        value = value if equals else next(waiting, "")
        if not value or found[file]:
            raise ConfigError(f"{flag} takes one file or folder: {USAGE}")
        found[file] = value
    return {file: value for file, value in found.items() if value}, others


def validate_batch(files: list[str], tree: Mapping[str, Any], host: PluginHost) -> BatchRun:
    """Check a composed tree and the two files.

    Raises: ConfigError or PluginError naming the key, the value and the fix.
    """
    if len(files) != 2:
        raise ConfigError(f"a batch has two files, and {len(files)} are given: {USAGE}")
    check_keys(tree, (*ENGINE_KEYS, "batch", "sampling"))
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    batch: BatchConfig = build(BatchConfig, tree.get("batch") or {}, "batch")
    from hookline.core.data.admission import rows_in_flight  # brings asyncio, which a listing of keys need not wait for

    max_rows = batch.max_rows or rows_in_flight(config.engine.max_num_seqs)
    sampling = tree.get("sampling") or {}
    RowReader(batch.task, sampling)
    serve = ServeConfig(
        names=tuple(batch.names),
        timeout_s=batch.timeout_s,
        reasoning_parser=batch.reasoning_parser,
        tool_parser=batch.tool_parser,
    )
    input, output = Path(files[0]), Path(files[1])
    paths = _folders(input, output) if input.is_dir() else (_input(input, batch), _output(output, input))
    names = ("part_rows", "executor", "replicas", "num_cpus", "follow_links", "task", "prefix")
    further = {name: getattr(batch, name) for name in names}
    run = BatchRun(*paths, config, serve, max_rows, sampling=sampling, **further)
    if not run.is_folder:
        check_all_used(run, reads_parquet=False)
    return run


def check_all_used(run: BatchRun, reads_parquet: bool) -> None:
    """Refuse keys for parquet if the input has none.

    Raises: ConfigError naming the key.
    """
    if reads_parquet:
        return
    keys = {"batch.task": run.task != COMPLETION, "batch.prefix": run.prefix != ""}
    keys["sampling"] = bool(run.sampling) and SamplingParams.of(run.sampling) != SamplingParams()
    for key in (key for key, is_set in keys.items() if is_set):
        raise ConfigError(
            f"{key} is for rows in parquet, and the input has none; lines of JSONL say all in their body, as {EXAMPLE}"
        )


def _folders(input: Path, output: Path) -> tuple[Path, Path]:
    if output.is_file() or not output.parent.is_dir():
        raise ConfigError(f"{output} cannot be written: give a folder, or the name of a new one")
    input, output = input.resolve(), output.resolve()
    if input == output or input in output.parents or output in input.parents:
        raise ConfigError(f"one of {output} and {input} lies inside the other; give another folder for the answers")
    return input, output


def _input(path: Path, batch: BatchConfig) -> Path:
    if not path.is_file():
        what = "neither a file nor a folder" if path.exists() else "not there"
        raise ConfigError(f"{path} is {what}; give the file with the requests first")
    if path.suffix == ".parquet" or batch.executor != HERE:
        why = "parquet is" if path.suffix == ".parquet" else f"batch.executor={batch.executor} is for files"
        raise ConfigError(f"{path} is a file, and {why} read from a folder; give the folders of input and output")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path} cannot be read")
    return path


def _output(path: Path, input: Path) -> Path:
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: give a file in a folder that is there")
    if path.exists() and path.samefile(input):
        raise ConfigError(f"{path} is the input; give another file for the answers")
    if path.suffix == ".parquet":
        raise ConfigError(
            f"{path}: the answers to a file of JSON lines are JSON lines; give a name that ends in .jsonl"
        )
    return path
