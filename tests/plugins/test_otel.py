"""The OpenTelemetry observer: one span for each request, with its figures and without anything it said."""

import http.server
import threading
import time

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra: pip install hookline[otel]")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hookline.core.contracts import RequestBegin
from hookline.core.errors import PromptTooLongError, RequestError
from hookline.core.plugin.check_plugin import new_manager
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.observers import Observers
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import drain
from hookline.plugins.observers import OtelConfig
from hookline.plugins.observers.otel import OpenTelemetry


class Traced:
    """An engine with the observer, and the spans that it has sent."""

    def __init__(self, config=None, **options):
        self.exporter = InMemorySpanExporter()
        self.observer = OpenTelemetry(config or OtelConfig(), self.exporter)
        observers = Observers(new_manager(), {"otel": self.observer})
        self.engine = fake_engine(PlainScheduler(), observers=observers, model_name="tiny", **options)

    def spans(self):
        self.observer.provider.force_flush()
        return sorted(self.exporter.get_finished_spans(), key=lambda span: int(span.attributes["gen_ai.response.id"]))


@pytest.fixture
def traced():
    traced = Traced()
    yield traced
    traced.engine.close()


def params(max_tokens=4, **values):
    return SamplingParams(max_tokens=max_tokens, seed=1, **values)


def test_a_request_is_a_span_with_its_figures(traced):
    options = RequestOptions(priority=2, tags={"tenant": "acme"}, deadline_s=5.0)
    traced.engine.add([1, 2, 3], params(temperature=0.5), options=options)
    [output] = drain(traced.engine)
    [span] = traced.spans()
    assert (span.name, span.kind, span.status.status_code) == (
        "text_completion tiny",
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    attributes = dict(span.attributes)
    times = output.timings
    assert attributes.pop("gen_ai.latency.time_in_queue") == times.queue_s
    assert attributes.pop("gen_ai.latency.time_to_first_token") == times.time_to_first_token_s
    assert attributes.pop("gen_ai.latency.e2e") == times.total_s
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "hookline",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "0",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 1,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "hookline.priority": 2,
        "hookline.deadline_s": 5.0,
        "hookline.num_preemptions": 0,
        "hookline.tag.tenant": "acme",
    }


def test_a_span_lasts_as_long_as_its_request_and_marks_the_first_token(traced):
    before = time.time_ns()
    traced.engine.add([1, 2, 3], params(20))
    [output] = drain(traced.engine)
    after = time.time_ns()
    [span] = traced.spans()
    assert before - 10**7 <= span.start_time < span.end_time <= after + 10**7
    assert span.end_time - span.start_time == pytest.approx(1e9 * output.timings.total_s, abs=2e6)
    [first] = span.events
    assert first.name == "first_token" and span.start_time < first.timestamp < span.end_time


def test_nothing_that_a_request_says_is_in_its_span(traced):
    stop = "a secret stop"
    with pytest.raises(Exception, match="needs a watcher"):
        traced.engine.add(
            [1], params(stop=(stop,)), prompt="a secret prompt", options=RequestOptions(cache_salt="a secret salt")
        )
    traced.engine.add([1, 2], params(), prompt="a secret prompt", options=RequestOptions(cache_salt="a secret salt"))
    drain(traced.engine)
    [span] = traced.spans()
    assert "secret" not in span.to_json()


def test_requests_that_were_aborted_or_refused_have_spans_that_say_so(traced):
    traced.engine.abort([traced.engine.add([7], params())])
    traced.engine.refuse(
        [1] * 9, PromptTooLongError("the prompt says: hello"), options=RequestOptions(tags={"tenant": "acme"})
    )
    aborted, refused = traced.spans()
    assert aborted.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert aborted.status.status_code is StatusCode.UNSET and not aborted.events
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.attributes["error.type"] == "prompt_too_long" and refused.attributes["hookline.tag.tenant"] == "acme"
    assert "hello" not in refused.to_json()


def test_a_callers_span_is_the_parent_if_a_tag_names_it(traced):
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    traced.engine.add([1], params(), options=RequestOptions(tags={"traceparent": f"00-{trace}-{parent}-01"}))
    traced.engine.add([1], params(), options=RequestOptions(tags={"traceparent": "nonsense"}))
    drain(traced.engine)
    child, root = traced.spans()
    assert (child.context.trace_id, child.parent.span_id) == (int(trace, 16), int(parent, 16))
    assert root.parent is None and "hookline.tag.traceparent" not in root.attributes


def test_a_request_joins_the_trace_whose_headers_came_with_it(traced):
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "tracestate": "vendor=1", "baggage": "a=secret"}
    own = {"gen_ai.operation.name": "chat", "gen_ai.response.id": "chatcmpl-1"}
    traced.engine.add([1], params(), options=RequestOptions(trace={**headers, **own}))
    drain(traced.engine)
    traced.observer.provider.force_flush()
    [span] = traced.exporter.get_finished_spans()
    assert (span.context.trace_id, span.parent.span_id) == (int(trace, 16), int(parent, 16))
    assert span.context.trace_state.get("vendor") == "1" and "secret" not in span.to_json()
    assert span.name == "chat tiny" and {key: span.attributes[key] for key in own} == own


def test_a_pooled_request_is_an_embedding(traced):
    traced.observer.on_request_begin(RequestBegin(5, 0.0, 3, params(), 0, {}, None, is_pooled=True))
    traced.engine.close()
    [span] = traced.exporter.get_finished_spans() or [traced.observer._spans[5]]
    assert span.attributes["gen_ai.operation.name"] == "embeddings"


@pytest.mark.parametrize(
    ("environment", "config", "name"),
    [
        ({}, {}, "hookline"),
        ({"OTEL_SERVICE_NAME": "gateway"}, {}, "gateway"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mesh,deployment.environment=test"}, {}, "mesh"),
        ({"OTEL_SERVICE_NAME": "gateway"}, {"service_name": "mine"}, "mine"),
    ],
)
def test_a_service_has_the_name_that_opentelemetrys_variables_say(monkeypatch, environment, config, name):
    for key in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    traced = Traced(OtelConfig(**config))
    traced.engine.add([1], params())
    traced.engine.close()
    [span] = traced.exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == name
    told = span.resource.attributes.get("deployment.environment")
    assert told == ("test" if "OTEL_RESOURCE_ATTRIBUTES" in environment else None)


@pytest.mark.parametrize("trace", ["x", {"traceparent": 5}, {"baggage": "x" * 8193}, ["traceparent"]])
def test_a_trace_that_is_none_is_refused_in_one_line(traced, trace):
    with pytest.raises(RequestError, match="must be a mapping of names to texts, of at most 8192 characters each"):
        traced.engine.add([1], params(), options=RequestOptions(trace=trace))


def test_closing_the_engine_ends_and_sends_every_span():
    traced = Traced(OtelConfig(model_name="named"))
    traced.engine.add([1], params())
    traced.engine.close()
    [span] = traced.exporter.get_finished_spans()
    assert span.attributes["gen_ai.request.model"] == "named"
    assert span.resource.attributes["service.name"] == "hookline"


@pytest.mark.slow
def test_spans_arrive_over_http():
    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers.get("Content-Encoding"), body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        observer = OpenTelemetry(OtelConfig(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces"))
        engine = fake_engine(PlainScheduler(), observers=Observers(new_manager(), {"otel": observer}))
        engine.add([1], params())
        drain(engine)
        engine.close()
    finally:
        server.shutdown()
        server.server_close()
    [(path, encoding, body)] = received
    assert (path, encoding) == ("/v1/traces", None)
    [spans] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert spans.scope_spans[0].spans[0].name.startswith("text_completion")


def test_a_collector_that_is_not_there_costs_no_request_and_little_time():
    observer = OpenTelemetry(OtelConfig(endpoint="http://127.0.0.1:9/v1/traces", timeout_s=0.2))
    engine = fake_engine(PlainScheduler(), observers=Observers(new_manager(), {"otel": observer}))
    engine.add([1], params())
    assert len(drain(engine)) == 1
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 20  # its client would try again for a minute


def test_it_is_an_option_with_fields():
    entry = PluginHost.load(environ={}).registry.find("observer", "otel")
    assert entry is not None and entry.config is OtelConfig
