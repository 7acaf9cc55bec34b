"""`profile=PATH`: a Chrome or Perfetto trace of some steps, with each step and its parts as named ranges.

Knows the engine's `watch` and torch.profiler; where the time went is for the reader of the trace to see.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.core.config.schema import build
from hookline.core.errors import ConfigError, one_short_line
from hookline.core.util.files import check_writable, path_of
from hookline.core.util.ranges import bounded

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM

SUFFIXES = (".json", ".json.gz")
QUIET = ("KINETO_LOG_LEVEL", "6")
"""Variable and value that keep torch's profiler from logging its start and stop on standard error. Its errors have a
lower level: set the variable to 4 to see them. It is read when the profiler first runs."""
logger = logging.getLogger("hookline")


@dataclass(frozen=True)
class ProfileKeys:
    """Root keys of a run and of a benchmark."""

    profile: str | None = None
    """file.json or file.json.gz: a Chrome or Perfetto trace of some steps."""
    profile_steps: int = bounded(20, 1)
    """How many steps it shows."""
    profile_skip: int = bounded(10, 1)
    """Steps before them, as a warm-up."""


@dataclass(frozen=True)
class Profile:
    """Which steps to trace, and the file that the trace goes to.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    path: Path
    num_steps: int = ProfileKeys.profile_steps
    num_skipped: int = ProfileKeys.profile_skip

    def __post_init__(self) -> None:
        if not self.path.name.endswith(SUFFIXES):
            raise ConfigError(f"profile={self.path}: the name must end in {' or '.join(SUFFIXES)}")
        check_writable(self.path, "profile")

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Profile | None:
        """The profile that a composed configuration asks for; None without `profile`."""
        if tree.get("profile") is None:
            return None
        keys = {one.name: tree[one.name] for one in fields(ProfileKeys) if tree.get(one.name) is not None}
        asked: ProfileKeys = build(ProfileKeys, keys)
        return cls(path_of(asked.profile), asked.profile_steps, asked.profile_skip)


@contextmanager
def profiled(llm: LLM, profile: Profile | None) -> Iterator[None]:
    """A context in which the steps of the LLM's engine are traced, if a profile is wanted.

    The file is written whole or not at all; an existing file is replaced once the new one is complete.
    Raises: ConfigError if there were too few steps to trace any, if no step is computed in this process, or if the file
    cannot be written.
    """
    if profile is None:
        yield
        return
    if not llm.engine.executor.is_here:
        raise ConfigError(
            f"profile={profile.path} shows what this process does, and rank 0 computes in another one; leave out "
            "engine.executor and engine.rank_0 for it"
        )
    trace = _StepTrace(profile)
    llm.engine.watch.use_tracer(trace)
    try:
        try:
            with trace.recording():
                yield
        finally:
            llm.engine.watch.use_tracer(None)
        trace.report()
    finally:
        trace.tidy()


class _StepTrace:
    """`core.step.timing.Tracer` over torch.profiler."""

    def __init__(self, profile: Profile) -> None:
        os.environ.setdefault(*QUIET)
        import torch.profiler as profiler

        self.profile, self._profiler, self._num_seen = profile, profiler, 0
        # The profiler wants a step of its own before it records: start-up costs would be in the trace otherwise.
        schedule = profiler.schedule(wait=profile.num_skipped - 1, warmup=1, active=profile.num_steps, repeat=1)
        self._profile = profiler.profile(schedule=schedule, on_trace_ready=self._write)
        suffix = next(suffix for suffix in SUFFIXES if profile.path.name.endswith(suffix))
        self._unfinished = profile.path.with_name(f".{os.urandom(8).hex()}{suffix}")
        self._is_written, self._fault = False, ""

    def recording(self) -> AbstractContextManager[Any]:
        """A context around the skipped and the traced steps."""
        return self._profile

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """See Tracer."""
        with self._profiler.record_function(f"step {number}"):
            yield
        self._num_seen += 1
        self._profile.step()

    def part(self, name: str) -> AbstractContextManager[Any]:
        """See Tracer."""
        return self._profiler.record_function(name)

    def _write(self, finished: Any) -> None:
        if self._num_seen > self.profile.num_skipped:
            self._is_written = True
            try:
                finished.export_chrome_trace(str(self._unfinished))
            except OSError as error:
                self._fault = error.strerror or one_short_line(error)

    def report(self) -> None:
        """Log the file and its counts of launches. Raises: ConfigError if no step was traced."""
        profile = self.profile
        if not self._is_written:
            raise ConfigError(
                f"profile={profile.path} was not written: there were {self._num_seen} steps, and "
                f"profile_skip={profile.num_skipped} leaves out as many; lower it"
            )
        num_steps = min(self._num_seen - profile.num_skipped, profile.num_steps)
        counts = self._finished()
        each = ", ".join(f"{count / num_steps:.1f} {what}" for what, count in counts.items())
        logger.info("wrote a profile of %d steps to %s%s", num_steps, profile.path, each and f"; each {each}")

    def _finished(self) -> dict[str, int]:
        """Move the file to its place, after counting its events: torch does not report a file written in part."""
        try:
            counts = count_launches(self._unfinished)
            os.replace(self._unfinished, self.profile.path)
        except (OSError, EOFError, ValueError, KeyError, zlib.error) as error:
            why = self._fault or f"what torch wrote is no whole trace ({one_short_line(error)}); is the disk full?"
            raise ConfigError(f"profile={self.profile.path} cannot be written: {why}") from error
        return counts

    def tidy(self) -> None:
        """Remove an unfinished file."""
        with suppress(OSError):
            self._unfinished.unlink(missing_ok=True)


def count_launches(path: Path) -> dict[str, int]:
    """Kernels, launches of single kernels and replays of graphs in a trace; empty without a GPU."""
    import gzip

    with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as file:
        events = json.load(file)["traceEvents"]
    kinds = Counter(filter(None, (_launch_kind(event) for event in events)))
    return dict(sorted(kinds.items()))


def _launch_kind(event: Mapping[str, Any]) -> str | None:
    category, name = event.get("cat"), str(event.get("name"))
    if category == "kernel":
        return "kernels"
    if category not in ("cuda_runtime", "cuda_driver"):
        return None
    if name.startswith("cudaGraphLaunch"):
        return "graph replays"
    return "single launches" if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) else None
