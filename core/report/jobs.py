"""The jobs of one or several sweeps: their result lines, and the recordings of finished jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.core.bench.files import STEPS, read_recording
from hookline.core.bench.recorder import Recording
from hookline.core.cli.output import say
from hookline.core.errors import ConfigError, clipped
from hookline.core.sweep.job_status import DONE
from hookline.core.sweep.results import RESULTS, objective_value, read_results
from hookline.core.util.process import called_as

NEEDED = ("end_s", "num_drawn", "running", "waiting", "free_blocks", "preemptions")
"""Columns of the records of steps that the report reads."""


@dataclass(frozen=True, eq=False)
class Job:
    """A job of a sweep.

    id: its unique name (see `_ids`), after the sweep's name if there are several. record: its result line
    (docs/benchmarks.md). recording: None if it is not there.
    """

    id: str
    folder: Path
    record: Mapping[str, Any]
    recording: Recording | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has figures to compare."""
        return bool(self.record["status"] == DONE)

    @property
    def config(self) -> Mapping[str, Any]:
        """The job's configuration; empty if the job failed before it was composed."""
        return self.record.get("config") or {}

    @property
    def overrides(self) -> dict[str, str]:
        """Its arguments by key, without the + of Hydra's grammar."""
        pairs = (str(override).lstrip("+~").partition("=") for override in self.record.get("overrides", ()))
        return {key: value for key, _, value in pairs}

    @property
    def by_tag(self) -> Mapping[str, Mapping[str, Any]]:
        """Its figures for each value of each tag's key; empty if no request had a tag."""
        return (self.record.get("metrics") or {}).get("by_tag") or {} if self.is_done else {}

    def figure(self, name: str) -> float | None:
        """A figure by name, `ttft_s.p99` say; None if the job has none."""
        return objective_value(self.record.get("metrics") or {}, name) if self.is_done else None


def read_jobs(folders: Sequence[Path]) -> list[Job]:
    """The jobs of all sweeps, in order; a folder that is given twice is read once.

    Raises: ConfigError if a folder holds no results, or a line of them cannot be read.
    """
    folders = list({folder.resolve(): folder for folder in folders}.values())
    names = _names(folders)
    return [job for folder, name in zip(folders, names, strict=True) for job in _jobs_of(folder, name)]


def _names(folders: Sequence[Path]) -> list[str]:
    """A prefix for the job numbers of each sweep: the folder's own name where it is unique, else its path."""
    if len(folders) == 1:
        return [""]
    short = [folder.resolve().name for folder in folders]
    return [f"{name if short.count(name) == 1 else folder}/" for name, folder in zip(short, folders, strict=True)]


def _jobs_of(folder: Path, name: str) -> Iterable[Job]:
    if not (folder / RESULTS).is_file():
        sweep = f"{called_as('bench')} -m ..."
        inner = [str(one.parent) for one in sorted(folder.glob(f"*/{RESULTS}"))]
        there = f", as {clipped(', '.join(inner))}" if inner else f" ({sweep})"
        raise ConfigError(f"there is no {folder / RESULTS}; give the folder of a sweep{there}")
    records = read_results(folder)
    if not records:
        raise ConfigError(f"{folder / RESULTS} is empty: no job of the sweep has ended yet")
    for record, own_id in zip(records, _ids(records), strict=True):
        own = None if record["folder"] is None else folder / record["folder"]
        yield Job(f"{name}{own_id}", own or folder, record, None if own is None else _recording(own))


def _ids(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A unique name for each job of a sweep: its number. If the folder was used again with other values, jobs of two
    commands can have the same number; then the name of each job's own folder, or else its key.
    """
    *candidates, keys = ([str(record[name]) for record in records] for name in ("job", "folder", "key"))
    return next((ids for ids in candidates if len(set(ids)) == len(ids)), keys)


def _recording(folder: Path) -> Recording | None:
    if not (folder / STEPS).exists():
        return None
    try:
        recording = read_recording(folder)
        missing = [name for name in NEEDED if name not in recording.steps]
        if not missing:
            return recording
        problem = f"{folder / STEPS} has no {', '.join(missing)}"
    except (ConfigError, KeyError, TypeError) as error:
        problem = (
            str(error) if isinstance(error, ConfigError) else f"{folder} holds other records than these: {error!r}"
        )
    say(f"{problem}; the report shows this job without it")
    return None
