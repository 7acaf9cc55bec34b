"""Metrics of an engine for Prometheus, named as vLLM's are, with the prefix `hookline_` in place of `vllm:`.

Counters, gauges and the gaps between tokens move once a step, all of them at once, the other histograms once a request.
Each object has a registry of its own, so several engines of a process do not mix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from hookline.core.contracts import Observer
from hookline.core.errors import ConfigError, PluginFault, PromptTooLongError, QueueFullError, RequestError, shown
from hookline.core.outputs import FinishReason

if TYPE_CHECKING:
    from hookline.core.contracts import EngineView, ExtensionCost, StepStats
    from hookline.core.outputs import RequestOutput
    from hookline.plugins.observers import PrometheusConfig

Gaps = np.ndarray[Any, np.dtype[np.float64]]
PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LONG_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
"""Buckets of times that a whole request takes, in seconds."""
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
REFUSALS = tuple(error.reason for error in (RequestError, PromptTooLongError, QueueFullError, PluginFault))
"""Reasons that are shown from the start; others appear when they come."""
LATE = "Kernels and graphs that were compiled, loaded or captured after the engine was ready, while requests waited."
EXTENSION_COSTS = {
    "steps": ("Steps that ran a step extension or logits processor.", "num_steps"),
    "host_seconds": ("Time in its methods on the host.", "host_s"),
    "timed_steps": ("Steps in which its methods on the device were timed.", "num_timed_steps"),
    "device_seconds": ("Time in its methods on the device, in the steps in which they were timed.", "device_s"),
}
"""Counters of extensions: what follows `extension_`, the help, and the field of ExtensionCost."""
DRAFTS = {
    "draft": "Drafts that steps computed, by their position behind the newest token, from 0.",
    "accepted": "Drafts that became tokens of their requests, by the same position.",
}
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Prometheus(Observer):
    """`hookline.core.contracts.Observer`: `text()` is what a scrape gets, `registry` is for an exporter of your own."""

    def __init__(self, config: PrometheusConfig) -> None:
        self._config = config
        if not PREFIX.fullmatch(config.prefix):
            raise ConfigError(
                f"observers: prefix={shown(config.prefix)} must begin the names of metrics, as hookline_ does"
            )
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.port: int | None = None
        """Port of the endpoint while the engine lives, if there is one."""
        self._server: Any = None

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def on_engine_start(self, engine: EngineView) -> None:
        """See the hook of this name."""
        model_name = self._config.model_name or engine.model_name.removeprefix("package:")
        make = _Maker(self.registry, model_name, self._config.prefix)
        build = Info(f"{self._config.prefix}build", "What serves.", registry=self.registry)
        build.info({"model_name": model_name, **{name: version(name) for name in ("hookline", "torch")}})
        self._gauges = _gauges(make, engine)
        self._step, self._request = _StepMetrics(make), _RequestMetrics(make)
        if late_work := engine.late_work:  # live counts, which do not hold the engine
            make.read_counters("late_compilations", LATE, "kind", lambda: late_work)
        costs = engine.extension_costs
        for name, (help, field) in EXTENSION_COSTS.items():
            make.read_counters(f"extension_{name}", help, "extension", partial(_of_each, costs, field))
        if (drafts := engine.speculation) is not None:
            read = {"draft": lambda: drafts.drafted, "accepted": lambda: drafts.kept}
            for name, counted in read.items():
                make.read_counters(
                    f"spec_decode_{name}_tokens_per_pos", DRAFTS[name], "position", partial(_places, counted)
                )
        self._gaps = make.gaps("inter_token_latency_seconds", "From one token of a request to its next.", TOKEN_S)
        if self._config.port is not None:
            self._server, _ = start_http_server(self._config.port, self._config.address, self.registry)
            self.port = self._server.server_port

    def on_token_gaps(self, gaps_s: Gaps) -> None:
        """See the hook of this name."""
        self._gaps.observe(gaps_s)

    def on_step_end(self, stats: StepStats) -> None:
        """See the hook of this name."""
        self._step.observe(stats)

    def on_request_end(self, output: RequestOutput) -> None:
        """See the hook of this name."""
        self._request.observe(output)

    def on_engine_stop(self, engine: EngineView) -> None:
        """See the hook of this name."""
        for gauge in self._gauges:
            gauge.set_function(lambda: 0)  # and let go of the engine
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = self.port = None


def _places(counted: Callable[[], Sequence[int]]) -> Mapping[str, float]:
    """Counts in a list, by their places."""
    return {str(place): float(count) for place, count in enumerate(counted())}


class _Maker:
    """Makes metrics that have the label model_name."""

    def __init__(self, registry: CollectorRegistry, model_name: str, prefix: str) -> None:
        self._registry, self._model_name, self._prefix = registry, model_name, prefix

    def gauges(self, name: str, help: str, label: str, values: Mapping[str, Callable[[], float]]) -> list[Gauge]:
        gauge = Gauge(self._prefix + name, help, ["model_name", label], registry=self._registry)
        made = {value: gauge.labels(self._model_name, value) for value in values}
        for value, one in made.items():
            one.set_function(values[value])
        return list(made.values())

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> Gauge:
        gauge = Gauge(self._prefix + name, help, ["model_name"], registry=self._registry).labels(self._model_name)
        gauge.set_function(value)
        return gauge

    def counter(self, name: str, help: str) -> Counter:
        return Counter(self._prefix + name, help, ["model_name"], registry=self._registry).labels(self._model_name)

    def open_counter(self, name: str, help: str, label: str, known: Iterable[str]) -> Callable[[str], None]:
        """Counts by a label whose values are not all known; returns what adds 1 to one of them."""
        counter = Counter(self._prefix + name, help, ["model_name", label], registry=self._registry)
        for value in known:
            counter.labels(self._model_name, value)
        return lambda value: counter.labels(self._model_name, value).inc()

    def read_counters(self, name: str, help: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Counters that the engine keeps, read at each scrape."""
        self._registry.register(_ReadCounters(self._prefix + name, help, self._model_name, label, read))

    def gaps(self, name: str, help: str, buckets: tuple[float, ...]) -> _Gaps:
        gaps = _Gaps(self._prefix + name, help, self._model_name, buckets)
        self._registry.register(gaps)
        return gaps

    def counters(self, name: str, help: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        counter = Counter(self._prefix + name, help, ["model_name", label], registry=self._registry)
        return {value: counter.labels(self._model_name, value) for value in values}

    def histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(self._prefix + name, help, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._model_name)


class _ReadCounters(Collector):
    """Counters that the engine keeps, by one label, read at each scrape."""

    def __init__(
        self, name: str, help: str, model_name: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._help, self._model_name, self._label, self._read = name, help, model_name, label, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        """What a scrape gets."""
        family = CounterMetricFamily(self._name, self._help, labels=["model_name", self._label])
        for value, count in self._read().items():
            family.add_metric([self._model_name, value], count)
        yield family


class _Gaps(Collector):
    """A histogram that takes many samples at once."""

    def __init__(self, name: str, help: str, model_name: str, buckets: tuple[float, ...]) -> None:
        self._name, self._help, self._model_name, self._buckets = name, help, model_name, buckets
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum_s = 0.0

    def observe(self, gaps_s: Gaps) -> None:
        self._counts += np.bincount(np.searchsorted(self._buckets, gaps_s), minlength=len(self._counts))
        self._sum_s += float(gaps_s.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What a scrape gets."""
        ends = [*map(str, map(float, self._buckets)), "+Inf"]
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        counts = [(end, float(count)) for end, count in zip(ends, np.cumsum(self._counts), strict=True)]
        family.add_metric([self._model_name], counts, self._sum_s)
        yield family


def _gauges(make: _Maker, engine: EngineView) -> list[Gauge]:
    """What a scrape reads off the engine itself, so that it is true between steps, too."""
    usage = "Part of the KV-cache blocks in use; 1 is all."
    by_reason = "Requests that wait to run, by what for: their first place, or one again after a preemption."
    reasons = {reason: partial(_waiting, engine, reason) for reason in engine.waiting_by_reason}
    return [
        *make.gauges("num_requests_waiting_by_reason", by_reason, "reason", reasons),
        make.gauge("num_requests_running", "Requests that are running.", lambda: engine.num_running),
        make.gauge("num_requests_waiting", "Requests that wait to run.", lambda: engine.num_waiting),
        make.gauge("kv_cache_usage_perc", usage, lambda: 1 - engine.num_free_blocks / engine.num_blocks),
    ]


def _of_each(costs: Mapping[str, ExtensionCost], field: str) -> Mapping[str, float]:
    return {name: getattr(cost, field) for name, cost in costs.items()}


def _waiting(engine: EngineView, reason: str) -> int:
    return engine.waiting_by_reason[reason]


class _StepMetrics:
    def __init__(self, make: _Maker) -> None:
        self.preemptions = make.counter("num_preemptions", "Preemptions of requests.")
        self.prompt = make.counter("prompt_tokens", "Tokens of the prompts that were started.")
        self.generated = make.counter("generation_tokens", "Tokens generated.")
        self.queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.host = make.counter("step_host_seconds", "Time that the host worked for its steps.")
        self.wait = make.counter("step_wait_seconds", "Time that the host waited for the tokens of its steps.")
        self.tokens = make.histogram("iteration_tokens", "Tokens computed in a step.", STEP_TOKENS)

    def observe(self, stats: StepStats) -> None:
        self.preemptions.inc(stats.num_preemptions)
        self.prompt.inc(stats.num_prompt_tokens)
        self.generated.inc(stats.num_generated_tokens)
        self.queries.inc(stats.num_prompt_tokens)
        self.hits.inc(stats.num_cached_tokens)
        self.host.inc(max(0.0, stats.host_s))
        self.wait.inc(stats.wait_s)
        self.tokens.observe(stats.num_prefill_tokens + stats.num_decode_tokens)


class _RequestMetrics:
    def __init__(self, make: _Maker) -> None:
        self.ends = make.counters("request_success", "Requests that ended, by reason.", "finished_reason", FinishReason)
        self.refuse = make.open_counter("request_refusals", "Requests that were refused, by why.", "reason", REFUSALS)
        self.prompt = make.histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generated = make.histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.first = make.histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S)
        self.each = make.histogram("request_time_per_output_token_seconds", "Mean time of a further token.", TOKEN_S)
        self.queue = make.histogram("request_queue_time_seconds", "From arrival to the first step.", LONG_S)
        self.prefill = make.histogram("request_prefill_time_seconds", "From the first step to the first token.", LONG_S)
        self.decode = make.histogram("request_decode_time_seconds", "From the first token to the end.", LONG_S)
        self.inference = make.histogram("request_inference_time_seconds", "From the first step to the end.", LONG_S)
        self.total = make.histogram("e2e_request_latency_seconds", "From arrival to the end.", LONG_S)

    def observe(self, output: RequestOutput) -> None:
        self.ends[output.finish_reason].inc()
        if output.refusal is not None:
            self.refuse(output.refusal)
        times = output.timings
        if times is None:
            return  # refused: it never was in the engine
        self.prompt.observe(len(output.prompt_token_ids))
        self.generated.observe(len(output.token_ids))
        self.queue.observe(times.queue_s)
        self.total.observe(times.total_s)
        if times.scheduled_s is None or times.first_token_s is None:
            return
        decode_s = times.finished_s - times.first_token_s
        self.first.observe(times.first_token_s - times.arrival_s)
        self.prefill.observe(times.first_token_s - times.scheduled_s)
        self.inference.observe(times.finished_s - times.scheduled_s)
        self.decode.observe(decode_s)
        if len(output.token_ids) > 1:
            self.each.observe(decode_s / (len(output.token_ids) - 1))
