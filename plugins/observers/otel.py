"""A span for each request, by OpenTelemetry's conventions for generative models (`gen_ai.*`).

No text and no token of a request is in its span. Spans are made when requests begin and sent by a thread of
OpenTelemetry's, so the engine never waits for a collector, and spans that no collector takes are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from hookline.core.contracts import Observer
from hookline.core.outputs import FinishReason

if TYPE_CHECKING:
    from hookline.core.contracts import EngineView, RequestBegin
    from hookline.core.outputs import RequestOutput
    from hookline.plugins.observers import OtelConfig

OPERATION, COMPLETION, EMBEDDINGS = "gen_ai.operation.name", "text_completion", "embeddings"
NO_TRACE: Mapping[str, str] = {}
PARENT = "traceparent"
"""The tag that may hold a caller's span, as W3C Trace Context writes it, where no headers come with the request."""
OWN = "gen_ai."
"""How attributes of a request's span begin that come with the request."""
REQUEST = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters in a span, as gen_ai.request.NAME."""


class OpenTelemetry(Observer):
    """`hookline.core.contracts.Observer`: spans of one engine, through a provider of its own.

    exporter: what takes the spans; None sends them as the config says.
    """

    def __init__(self, config: OtelConfig, exporter: SpanExporter | None = None) -> None:
        self._config, self._exporter = config, exporter
        self._spans: dict[int, Span] = {}

    def on_engine_start(self, engine: EngineView) -> None:
        """See the hook of this name."""
        config = self._config
        exporter = self._exporter or OTLPSpanExporter(endpoint=config.endpoint, timeout=config.timeout_s)
        self.provider = TracerProvider(resource=_resource(config.service_name))
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("hookline")
        self._model_name = config.model_name or engine.model_name.removeprefix("package:")
        self._clock: Callable[[], float] = lambda: engine.clock()

    def on_request_begin(self, info: RequestBegin) -> None:
        """See the hook of this name."""
        attributes = {f"gen_ai.request.{name}": getattr(info.params, name) for name in REQUEST}
        attributes |= {"hookline.priority": info.priority, "hookline.deadline_s": info.deadline_s}
        attributes["gen_ai.usage.input_tokens"] = info.num_prompt_tokens
        operation = EMBEDDINGS if info.is_pooled else COMPLETION
        self._spans[info.request_id] = self._start(
            info.request_id, info.tags, info.arrival_s, attributes, info.trace, operation
        )

    def on_first_token(self, info: RequestBegin, first_token_s: float) -> None:
        """See the hook of this name."""
        self._spans[info.request_id].add_event("first_token", timestamp=self._ns(first_token_s))

    def on_request_end(self, output: RequestOutput) -> None:
        """See the hook of this name."""
        now_s = self._clock()
        span = self._spans.pop(output.request_id, None) or self._start(output.request_id, output.tags, now_s, {})
        for name, value in _outcome(output).items():
            if value is not None:
                span.set_attribute(name, value)
        if output.finish_reason is FinishReason.ERROR:
            span.set_attribute("error.type", output.refusal or "engine")
            span.set_status(Status(StatusCode.ERROR))  # what the error says may name what the caller sent
        span.end(self._ns(now_s if output.timings is None else output.timings.finished_s))

    def on_engine_stop(self, engine: EngineView) -> None:
        """See the hook of this name."""
        del self._clock  # and let go of the engine
        self.provider.force_flush(int(1000 * self._config.timeout_s))
        self.provider.shutdown()

    def _start(
        self,
        id_: int,
        tags: Mapping[str, str],
        when_s: float,
        attributes: dict[str, Any],
        trace: Mapping[str, str] = NO_TRACE,
        operation: str = COMPLETION,
    ) -> Span:
        said: dict[str, Any] = {
            OPERATION: operation,
            "gen_ai.provider.name": "hookline",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": str(id_),
            **attributes,
            **{key: value for key, value in trace.items() if key.startswith(OWN)},
            **{f"hookline.tag.{key}": value for key, value in tags.items() if key != PARENT},
        }
        caller = {key: value for key, value in tags.items() if key == PARENT}
        caller |= {key: value for key, value in trace.items() if not key.startswith(OWN)}
        return self._tracer.start_span(
            f"{said[OPERATION]} {self._model_name}",
            context=propagate.extract(caller) if caller else None,
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in said.items() if value is not None},
            start_time=self._ns(when_s),
        )

    def _ns(self, when_s: float) -> int:
        """A moment of the engine's clock in nanoseconds since 1970."""
        return time.time_ns() - int(1e9 * (self._clock() - when_s))


def _resource(service_name: str | None) -> Resource:
    """What the spans are of: the environment and OpenTelemetry's detectors say it, and the configuration wins."""
    if service_name is not None:
        return Resource.create({SERVICE_NAME: service_name})
    found = Resource.create()
    is_named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found if is_named else found.merge(Resource({SERVICE_NAME: "hookline"}))


def _outcome(output: RequestOutput) -> dict[str, Any]:
    times = output.timings
    return {
        "gen_ai.response.finish_reasons": [output.finish_reason.value],
        "gen_ai.usage.output_tokens": len(output.token_ids),
        "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
        "gen_ai.latency.time_in_queue": None if times is None else times.queue_s,
        "gen_ai.latency.time_to_first_token": None if times is None else times.time_to_first_token_s,
        "gen_ai.latency.e2e": None if times is None else times.total_s,
        "hookline.num_preemptions": output.num_preemptions,
    }
