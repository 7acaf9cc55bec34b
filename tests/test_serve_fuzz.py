"""Whatever a client sends, it gets an answer that was promised: no 5xx but those, no traceback, no hang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hookline.core.serve.http.app import surfaces_of
from hookline.core.serve.http.openapi import document
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient
from tests.live_server import LiveServer, live_server

pytestmark = pytest.mark.slow
IS_NIGHTLY = settings.get_current_profile_name() == "nightly"
NUM_EXAMPLES = 500 if IS_NIGHTLY else 8
PROMISED = {200, 400, 401, 404, 408, 413, 429, 503}
LIMIT_S = 60
bounded = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=not IS_NIGHTLY,
    database=None,
    suppress_health_check=list(HealthCheck),
)
DOCUMENT = document(surfaces_of(FakeEngineClient(), ServeConfig()))
PATHS = [path for path, methods in DOCUMENT["paths"].items() if "post" in methods]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    def checked() -> FakeEngineClient:
        client = FakeEngineClient("<think>x</think>Hi <tool_call>\n")
        client.facts.codec.encode("")
        return client

    with live_server(checked) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
        yield client


def check(response: httpx.Response) -> None:
    assert response.status_code in PROMISED, response.text
    assert "Traceback" not in response.text and 'File "' not in response.text and "site-packages" not in response.text
    kind = response.headers["content-type"]
    if kind.startswith("application/json"):
        body = response.json()
        assert response.status_code == 200 or set(body["error"]) >= {"message", "type"}
        assert response.status_code == 200 or "\n" not in body["error"]["message"]
    else:
        assert response.status_code == 200 and kind.startswith("text/event-stream")
        check_events(response.text)


def check_events(text: str) -> None:
    """Every frame is whole, and a stream of OpenAI's ends with [DONE] or its last event."""
    assert text.endswith("\n\n")
    for frame in text.removesuffix("\n\n").split("\n\n"):
        data = frame.rpartition("data: ")[2]
        assert data == "[DONE]" or isinstance(json.loads(data), dict)


def test_what_the_document_promises_is_kept_for_whatever_it_allows(http: httpx.Client) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.method != "post":
            continue

        @bounded
        @given(case=operation.as_strategy())
        def runs(case: Any) -> None:
            headers = {name: value for name, value in (case.headers or {}).items() if is_header(value)}
            check(http.post(case.formatted_path, json=case.body, headers=headers))

        runs()


def is_header(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable()


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["auto", "user", "text", "function", "message", "tool_use", "", "x" * 5000])
)
KEYS = st.sampled_from(
    ["type", "text", "format", "name", "function", "parameters", "arguments", "json_schema", "schema", "content",
     "effort", "include_usage", "json", "regex", "choice", "input_schema", "role", "tool_choice", "after", "id"]
)  # fmt: skip
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | KEYS, inner, max_size=4),
    max_leaves=12,
)
GOOD: dict[str, Any] = {
    "prompt": "x",
    "input": "x",
    "messages": [{"role": "user", "content": "x"}],
    "tokens": [1],
    "max_tokens": 4,
}


@pytest.mark.parametrize("path", PATHS)
def test_any_value_in_any_field_gets_a_promised_answer(path: str, http: httpx.Client) -> None:
    reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    good = {
        name: value for name, value in GOOD.items() if name in fields and (name, path) != ("prompt", "/v1/responses")
    }

    @bounded
    @given(
        changed=st.dictionaries(st.sampled_from(sorted(fields)), ANYTHING, min_size=1, max_size=3), stream=st.booleans()
    )
    def runs(changed: dict[str, Any], stream: bool) -> None:
        body = {**good, **({"stream": True} if stream and "stream" in fields else {}), **changed}
        check(http.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"), headers=JSON))

    runs()


JSON = {"content-type": "application/json"}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "x"]) | ANYTHING},
    optional={
        "content": ANYTHING
        | st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.sampled_from(["text", "tool_use", "tool_result", "input_text", "image_url"]),
                    "text": ANYTHING,
                }
            ),
            max_size=3,
        ),
        "tool_calls": ANYTHING,
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]),
        "name": ANYTHING,
        "arguments": ANYTHING,
        "output": ANYTHING,
        "summary": ANYTHING,
    },
)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
        ("/tokenize", "messages"),
    ],
)
def test_any_messages_get_a_promised_answer(path: str, name: str, http: httpx.Client) -> None:
    @bounded
    @given(messages=st.lists(MESSAGE, max_size=4), stream=st.booleans())
    def runs(messages: list[Any], stream: bool) -> None:
        body = {name: messages, "stream": stream, "max_tokens": 4}
        check(http.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"), headers=JSON))

    runs()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"a": NaN}',
    ],
    ids=["empty", "null", "list", "text", "open", "bytes", "deep", "long", "nan"],
)
def test_what_is_no_json_object_is_400(path: str, body: bytes, http: httpx.Client) -> None:
    response = http.post(path, content=body, headers=JSON)
    check(response)
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Priority", "high"),
        ("X-Deadline-S", "x"),
        ("X-Timeout-S", "-1"),
        ("X-Timeout-S", "nan"),
        ("X-Tags", "no pair"),
        ("X-Priority", "9" * 5000),
    ],
)
def test_a_header_that_cannot_be_read_is_400(name: str, value: str, http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "x"}, headers={name: value})
    check(response)
    assert response.status_code == 400


def test_clients_that_leave_at_any_moment_leave_nothing(server: LiveServer, http: httpx.Client) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        for num_lines in (0, 1, 3, 7):
            body = {**GOOD, "max_tokens": 64, "stream": True}
            body.pop("prompt" if path == "/v1/responses" else "input")
            with http.stream("POST", path, json=body) as response:
                lines = response.iter_lines()
                for _ in range(num_lines):
                    next(lines, None)
    check(http.post("/v1/completions", json={"prompt": "x"}))
    assert http.get("/health").status_code == 200


def test_half_a_surrogate_pair_is_400(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers=JSON)
    check(response)
    assert response.status_code == 400
