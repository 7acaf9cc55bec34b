"""The keys of a benchmark besides the keys of a run: the dataclass of the root keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from hookline.core.bench.remote.settings import ClientConfig
from hookline.core.bench.slo import Slo
from hookline.core.bench.workload import WorkloadConfig
from hookline.core.run.settings import RunKeys
from hookline.core.util.ranges import bounded


@dataclass(frozen=True)
class BenchKeys(RunKeys):
    """Root keys of a benchmark, beside the kinds; keys about prompts have no effect."""

    url: str | None = None
    """Address of an OpenAI-compatible server, http://host:port, which is measured in place of an engine."""
    client: ClientConfig = field(default_factory=ClientConfig)
    """How that server is asked."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    """The load; a preset of conf/workload sets some of its fields."""
    slo: Slo = field(default_factory=Slo)
    """Latency bounds that a request must keep to count for goodput."""
    objective: str = "output_tok_s"
    """The figure that a sweeper optimises, e.g. goodput_s or ttft_s.p99."""
    repeats: int = bounded(2, 1)
    """Timed repetitions; the best counts."""
    result: str | None = None
    """file.jsonl that the result line is appended to."""
    records: str | None = None
    """Folder for steps.npz and requests.jsonl; in a sweep each job's own."""
    job_timeout_s: float | None = None
    """Of a sweep: seconds, above 0, after which a job is killed; None: never."""
