"""Spans of whole commands at a receiver of OTLP over HTTP: whose children they are, and the service that sent them."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra: pip install hookline[otel]")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.serving import ROOT, server, wait_for

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Receiver:
    """url: where spans are posted. spans: each with its resource's attributes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[tuple[Any, dict[str, str]]] = []

    @property
    def environ(self) -> dict[str, str]:
        """Of a command that sends its spans here."""
        attributes = "service.name=checkout,deployment.environment=test"
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_RESOURCE_ATTRIBUTES": attributes}
        return {**told, "OTEL_BSP_SCHEDULE_DELAY": "100"}  # milliseconds, in place of five seconds

    def take(self, body: bytes) -> None:
        """Keep the spans of a request."""
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {one.key: one.value.string_value for one in sent.resource.attributes}
            self.spans += [(span, resource) for scope in sent.scope_spans for span in scope.spans]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Receiver(f"http://127.0.0.1:{listening.server_port}")
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def check_span(span: Any, resource: dict[str, str], operation: str) -> None:
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert resource["service.name"] == "checkout" and resource["deployment.environment"] == "test"
    assert attributes(span)["gen_ai.operation.name"] == operation


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
def test_a_span_of_a_request_over_http_is_a_child_of_its_clients(receiver: Receiver, processes: int) -> None:
    arguments = (f"serve.processes={processes}", "observers=[otel]", "device=cpu")
    with server(*arguments, **receiver.environ) as running:
        body = {"prompt": "import os", "max_tokens": 2}
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert wait_for(lambda: receiver.spans)
        assert running.stop() == 0
    [(span, resource)] = receiver.spans
    check_span(span, resource, "text_completion")
    assert span.trace_state == "vendor=1" and attributes(span)["gen_ai.response.id"] == answer.json()["id"]


@pytest.mark.slow
def test_a_span_of_a_batch_s_row_is_a_child_of_the_one_that_the_row_names(receiver: Receiver, tmp_path: Path) -> None:
    body = {"prompt": "import os", "max_tokens": 2, "tags": {"traceparent": TRACEPARENT}}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "hookline", "batch", "-i", "in.jsonl", "-o", "out.jsonl", "observers=[otel]"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **receiver.environ}
    done = subprocess.run([*command, "device=cpu"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [(span, resource)] = receiver.spans
    check_span(span, resource, "text_completion")
