"""`profile=PATH`: a Chrome or Perfetto trace of some steps, with each step and its parts as named ranges.

Knows the engine's `watch` and torch.profiler; where the time went is for the reader of the trace to see.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.core.errors import ConfigError

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM

PROFILE_KEYS = ("profile", "profile_steps", "profile_skip")
"""Root keys of a run and of a benchmark."""
SUFFIXES = (".json", ".json.gz")
QUIET = ("KINETO_LOG_LEVEL", "6")
"""Variable and value that keep what torch's profiler says of its start and stop off standard error. Its errors have a
lower level: whoever sets 4 sees them. It is read when the profiler first runs."""
logger = logging.getLogger("hookline")


@dataclass(frozen=True)
class Profile:
    """Which steps to trace, and the file that the trace goes to.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    path: Path
    num_steps: int = 20
    num_skipped: int = 10

    def __post_init__(self) -> None:
        _check_count("profile_steps", self.num_steps)
        _check_count("profile_skip", self.num_skipped)
        if not self.path.name.endswith(SUFFIXES):
            raise ConfigError(f"profile={self.path}: the name must end in {' or '.join(SUFFIXES)}")
        if not self.path.parent.is_dir():
            raise ConfigError(f"profile={self.path}: the folder {self.path.parent} does not exist; make it first")
        if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
            raise ConfigError(f"profile={self.path} cannot be written")

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Profile | None:
        """What a composed tree asks for; None without `profile`."""
        if tree.get("profile") is None:
            return None
        given = {"num_steps": tree.get("profile_steps"), "num_skipped": tree.get("profile_skip")}
        return cls(Path(str(tree["profile"])), **{key: value for key, value in given.items() if value is not None})


def _check_count(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value!r} must be a whole number of at least 1")


@contextmanager
def profiled(llm: LLM, profile: Profile | None) -> Iterator[None]:
    """Trace the steps of its engine meanwhile, if a profile is wanted.

    Raises: ConfigError if there were too few steps to trace any.
    """
    if profile is None:
        yield
        return
    trace = _StepTrace(profile)
    llm.engine.watch.tracer = trace
    try:
        with trace.recording():
            yield
    finally:
        llm.engine.watch.tracer = None
    trace.report()


class _StepTrace:
    """`core.step.timing.Tracer` over torch.profiler."""

    def __init__(self, profile: Profile) -> None:
        os.environ.setdefault(*QUIET)
        import torch.profiler as profiler

        self.profile, self._profiler, self._num_seen = profile, profiler, 0
        # The profiler wants a step of its own before it records: start-up costs would be in the trace otherwise.
        schedule = profiler.schedule(wait=profile.num_skipped - 1, warmup=1, active=profile.num_steps, repeat=1)
        self._profile = profiler.profile(schedule=schedule, on_trace_ready=self._write)
        self._is_written = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._profile:
            yield

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
            finished.export_chrome_trace(str(self.profile.path))
            self._is_written = True

    def report(self) -> None:
        """Say what was written."""
        profile = self.profile
        if not self._is_written:
            raise ConfigError(
                f"profile={profile.path} was not written: there were {self._num_seen} steps, and "
                f"profile_skip={profile.num_skipped} leaves out as many; lower it"
            )
        num_steps = min(self._num_seen - profile.num_skipped, profile.num_steps)
        counts = count_launches(profile.path)
        each = ", ".join(f"{count / num_steps:.1f} {what}" for what, count in counts.items())
        logger.info("wrote a profile of %d steps to %s%s", num_steps, profile.path, each and f"; each {each}")


def count_launches(path: Path) -> dict[str, int]:
    """Kernels, launches of single kernels and replays of graphs in a trace; empty without a GPU."""
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
