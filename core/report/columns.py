"""Finds the configuration keys in which the jobs of a sweep differ, as columns.

A group whose choice differs (`scheduler=a,b`, `workload=x,y`) is one column; a key inside of it is a column only if it
differs between jobs of the same choice. A key that only jobs of other revisions have is no column: it may have had
another name there, or be new.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hookline.core.report.jobs import Job

LOAD_KEYS = ("workload", "slo", "repeats")
"""Keys of the measurement's load and bounds, not of the measured engine."""
FACTS = {"on device": "device", "kernels taken": "kernels", "revision": "revision"}
"""Results that a comparison should show if they differ although the configurations are equal."""


@dataclass(frozen=True)
class Column:
    """A key and its value for each job, by id; None for a job without it."""

    name: str
    values: Mapping[str, Any]

    @property
    def is_load(self) -> bool:
        """Whether the key belongs to the load of the jobs."""
        return self.name.partition(".")[0] in LOAD_KEYS

    @property
    def is_number(self) -> bool:
        """Whether jobs can be sorted by the key."""
        known = [value for value in self.values.values() if value is not None]
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)

    def text(self, job: Job) -> str:
        """The value as shown."""
        return value_text(self.values[job.id])

    def short(self, job: Job) -> str:
        """The value as a part of a job's name: `chunked`, `max_num_seqs=64`."""
        key, value = self.name.rpartition(".")[2], self.text(job)
        return value if isinstance(self.values[job.id], str) else f"{key}={value}"


@dataclass(frozen=True)
class _Candidate:
    """How to find a job's value of a key. group: the choice that the key belongs to. asked: the key was set by
    arguments, and None counts as a value.
    """

    of: Callable[[Job], Any]
    group: str | None = None
    asked: bool = True


def value_text(value: Any) -> str:
    """A configuration value in the notation of the command line."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)


def columns_of(jobs: Sequence[Job]) -> list[Column]:
    """The columns in order of the arguments that set them, then of the configuration."""
    found = [
        column
        for name, candidate in _candidates(jobs).items()
        if (column := _differing(name, candidate, jobs)) is not None
    ]
    order = [key for job in jobs for key in job.overrides]
    place = {key: place for place, key in reversed(list(enumerate(order)))}
    found.sort(key=lambda column: (not column.is_load, place.get(column.name, len(order))))
    return found


def _candidates(jobs: Sequence[Job]) -> dict[str, _Candidate]:
    """All keys that may differ."""
    names = {key: None for job in jobs for key in (*job.config, *job.overrides, *_leaves(job.config))}
    groups = {key for job in jobs for key, value in job.config.items() if isinstance(value, Mapping)}
    found = {}
    for name in names:
        group = name.partition(".")[0] if "." in name else None
        if name in groups:
            found[name] = _Candidate(partial(_choice, group=name))
        elif not name.endswith(".name") and not name.startswith("hydra"):
            found[name] = _Candidate(partial(_value, name=name), group)
    facts = {title: _Candidate(partial(_fact, key=key), key, asked=False) for title, key in FACTS.items()}
    return {**found, **facts, "simulated": _Candidate(_is_simulated, asked=False)}


def _differing(name: str, candidate: _Candidate, jobs: Sequence[Job]) -> Column | None:
    """The column, if jobs of the same choice of its group differ in it; jobs without the key are not compared."""
    values = {job.id: candidate.of(job) for job in jobs}
    revisions = {job.record.get("revision") for job in jobs if _has(job, name)}
    seen = defaultdict(set)
    for job in jobs:
        may_be_none = candidate.asked and job.config and job.record.get("revision") in revisions
        if values[job.id] is not None or may_be_none:
            choice = _choice(job, candidate.group) if candidate.group else None
            seen[choice].add(json.dumps(values[job.id], sort_keys=True, default=str))
    return Column(name, values) if any(len(different) > 1 for different in seen.values()) else None


def _has(job: Job, name: str) -> bool:
    """Whether a job's configuration has this key, or its arguments set it."""
    tree: Any = job.config
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return name in job.overrides
        tree = tree[part]
    return True


def _choice(job: Job, group: str) -> Any:
    """The choice of a group: as the arguments name it (presets have names of their own), or the option."""
    options = job.config.get(group)
    return job.overrides.get(group) or (options.get("name") if isinstance(options, Mapping) else options)


def _value(job: Job, name: str) -> Any:
    tree: Any = job.config
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _parsed(job.overrides.get(name))
        tree = tree[part]
    return tree


def _parsed(text: str | None) -> Any:
    """An argument's value; as text if it is not a number or the like."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def _fact(job: Job, key: str) -> Any:
    value = job.record.get(key)
    return value[:10] if key == "revision" and isinstance(value, str) else value


def _is_simulated(job: Job) -> Any:
    return bool(job.record.get("simulated")) if job.is_done else None


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif prefix:
            yield f"{prefix}{key}"
