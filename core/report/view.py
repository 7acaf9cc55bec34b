"""A sweep laid out for reading: jobs grouped by the load they served, each group with a baseline and ratios to it.

Throughput and latency of different loads are not comparable, so a ratio is always between two jobs of the same load,
unless no two jobs share one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hookline.core.errors import ConfigError
from hookline.core.report.columns import LOAD_KEYS, Column, columns_of
from hookline.core.report.figures import STEADY, Figure, figures_of, number
from hookline.core.report.jobs import Job

FIRST = "first"


@dataclass(frozen=True)
class Ratio:
    """A figure relative to the baseline's. verdict: better, worse, or ""."""

    value: float
    verdict: str

    @property
    def text(self) -> str:
        """As shown: 1.62×."""
        return f"{self.value:.2f}×" if 0.1 <= self.value < 10 else f"{number(self.value)}×"


@dataclass(frozen=True)
class Group:
    """Jobs that served the same load. name: of the load, among others; "" if there is only one."""

    name: str
    jobs: Sequence[Job]
    baseline: Job | None

    @cached_property
    def done(self) -> list[Job]:
        """The jobs with figures."""
        return [job for job in self.jobs if job.is_done]

    def ratio(self, figure: Figure, job: Job) -> Ratio | None:
        """The job's figure relative to the baseline's; None for the baseline itself, or without a value."""
        if self.baseline is None or job is self.baseline:
            return None
        value, base = job.figure(figure.name), self.baseline.figure(figure.name)
        if value is None or not base or not figure.better:
            return None
        ratio = value / base
        gain = (ratio - 1) * figure.better
        return Ratio(ratio, "" if abs(gain) < STEADY else "better" if gain > 0 else "worse")

    def best(self, figure: Figure) -> Job | None:
        """The row with the best value of a figure; None if there is nothing to choose from."""
        known = [job for job in self.done if job.figure(figure.name) is not None]
        if len(known) < 2 or not figure.better:
            return None
        return max(known, key=lambda job: figure.better * (job.figure(figure.name) or 0.0))

    def num_rivals(self, figure: Figure, best: Job) -> int:
        """Number of other jobs whose figure is as good as the best one, up to a difference that is negligible."""
        values = [job.figure(figure.name) for job in self.done if job is not best]
        top = best.figure(figure.name) or 0.0
        return sum(value is not None and abs(value - top) < STEADY * abs(top) for value in values)


@dataclass(frozen=True)
class Report:
    """The contents of a report, before drawing."""

    jobs: Sequence[Job]
    columns: Sequence[Column]
    groups: Sequence[Group]
    figures: Sequence[Figure]
    zero_figures: Sequence[Figure]

    @classmethod
    def of(cls, jobs: Sequence[Job], baseline: str = FIRST) -> Report:
        """Lay jobs out.

        Raises: ConfigError if the baseline is no job, or a job that is not done.
        """
        columns = columns_of(jobs)
        chosen = _chosen(jobs, baseline)
        loads: dict[str, list[Job]] = {}
        known = {_asked(job): _load(job) for job in jobs if job.config}
        for job in jobs:
            loads.setdefault(_load(job) if job.config else known.get(_asked(job), _asked(job)), []).append(job)
        if len(loads) == len(jobs):
            loads = {"": list(jobs)}
        groups = [_group(members, jobs, columns, chosen) for members in loads.values()]
        return cls(jobs, columns, groups, *figures_of(jobs))

    @property
    def failed(self) -> list[Job]:
        """The jobs without figures."""
        return [job for job in self.jobs if not job.is_done]

    def name(self, job: Job) -> str:
        """The differences of a job from others that served its load, in words."""
        return words(job, (column for column in self.columns if not column.is_load or len(self.groups) == 1))

    def label(self, job: Job) -> str:
        """The job's number and its differences."""
        name = self.name(job)
        return f"job {job.id}: {name}" if name else f"job {job.id}"

    @cached_property
    def _styles(self) -> dict[str, int]:
        names = dict.fromkeys(self.name(job) for job in self.jobs if job.is_done)
        return {name: style for style, name in enumerate(names)}

    def style(self, job: Job) -> int:
        """The number of its colour and dashes: the same for the same configuration under every load."""
        return self._styles[self.name(job)]


def words(job: Job, columns: Iterable[Column]) -> str:
    """A job's values of some columns, as far as it has any."""
    return ", ".join(column.short(job) for column in columns if column.values[job.id] is not None)


def _chosen(jobs: Sequence[Job], baseline: str) -> Job | None:
    if baseline == FIRST:
        return None
    found = next((job for job in jobs if job.id == baseline), None)
    done = ", ".join(job.id for job in jobs if job.is_done)
    if found is None:
        raise ConfigError(f"no job is named baseline={baseline}; give {FIRST} or one of: {done or 'none is done'}")
    if not found.is_done:
        status = found.record["status"].replace("_", " ")
        raise ConfigError(f"baseline={baseline} {status} and has no figures; give one of: {done or 'none is done'}")
    return found


def _load(job: Job) -> str:
    return json.dumps({key: job.config.get(key) for key in LOAD_KEYS}, sort_keys=True, default=str)


def _asked(job: Job) -> str:
    """The load's name from the arguments alone, for jobs that failed before their configuration was recorded."""
    return json.dumps({key: value for key, value in job.overrides.items() if key.partition(".")[0] in LOAD_KEYS})


def _group(members: Sequence[Job], jobs: Sequence[Job], columns: Sequence[Column], chosen: Job | None) -> Group:
    own = [column for column in columns if column.is_load]
    alone = len(members) == len(jobs)
    name = "" if alone else words(members[0], own)
    done = [job for job in members if job.is_done]
    return Group(name, members, _baseline(done, columns, chosen))


def _baseline(done: Sequence[Job], columns: Sequence[Column], chosen: Job | None) -> Job | None:
    """The baseline: the chosen job; under another load the job that differs from it only in the load; or the first."""
    if chosen is None or chosen in done:
        return chosen or (done[0] if done else None)
    others = [column for column in columns if not column.is_load]
    same = (job for job in done if all(column.values[job.id] == column.values[chosen.id] for column in others))
    return next(same, done[0] if done else None)
