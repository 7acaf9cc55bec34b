"""A plugin that fails for a request: a server's client hears of a fault of the server, by name and without details."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from hookline.core.errors import RequestError
from hookline.core.frontend.async_llm import AsyncLLM
from hookline.core.serve.in_process import InProcessClient
from hookline.plugins.grammars.llguidance_backend import LLGuidance
from hookline.plugins.poolers.heads import YesNo
from hookline.plugins.poolers.tokens import LastToken
from tests.live_server import PARSERS, LiveServer, live_server

pytestmark = pytest.mark.slow
SECRET = "/srv/secret/values.json"
CODE = "def fibonacci(n):\n"
CHAT = [{"role": "user", "content": "hi"}]
FAULTY = {"extra_args": {"faulty": {"amount": 1.0}}}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": CODE},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hi"},
}
POOLED: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/embeddings": (LastToken, {"input": CODE}),
    "/score": (YesNo, {"text_1": CODE, "text_2": "class Stack:"}),
    "/rerank": (YesNo, {"query": CODE, "documents": ["class Stack:", CODE]}),
}


def engine() -> InProcessClient:
    scores = {"name": "yes_no", "yes": "a", "no": "b"}  # the bundled tokenizer has no token for "yes"
    llm = AsyncLLM(device="cpu", engine={"cpu_cache_gib": 0.05, "max_model_len": 256}, pooler=scores)
    return InProcessClient(llm, PARSERS)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOKLINE_PLUGINS", "tests.faulty_exit")
        with live_server(engine) as started:
            yield started


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def processor() -> type:
    from tests.faulty_exit_options import Processor

    return Processor


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        raise error

    return fail


def crash() -> Exception:
    return FileNotFoundError(2, "No such file", SECRET)


def check_fault(error: dict[str, Any], blame: str, log: str) -> None:
    """Hold what a client hears, and what the log says, against what both should."""
    message = error.pop("message")
    assert error == {"type": "server_error", "param": None, "code": "internal_error"}
    assert message.startswith(blame) and message.endswith("; the server's log says why")
    assert SECRET not in message and "/" not in message and os.sep not in message and "\n" not in message
    assert SECRET in log


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", ["encode", "load", "process"])
def test_a_processor_that_fails_is_status_500(
    http: httpx.Client,
    processor: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    stream: bool,
    method: str,
) -> None:
    fail = failing(crash())
    monkeypatch.setattr(processor, method, staticmethod(fail) if method == "encode" else fail)
    with caplog.at_level(logging.ERROR, "hookline"):
        response = http.post(path, json={**ENDPOINTS[path], **FAULTY, "stream": stream})
    assert response.status_code == 500
    blame = f"processor 'faulty' of plugin 'tests.faulty_exit' (HOOKLINE_PLUGINS -) fails in {method}"
    check_fault(response.json()["error"], blame, caplog.text)


def test_a_fault_in_a_stream_that_has_begun_is_an_event(
    http: httpx.Client, processor: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def process(self: Any, logits_NV: Any, rows: Any) -> Any:
        calls.append(rows)
        if len(calls) > 3:
            raise crash()
        return logits_NV

    monkeypatch.setattr(processor, "process", process)
    fields = {"prompt": CODE, **FAULTY, "stream": True, "max_tokens": 20, "ignore_eos": True}
    with caplog.at_level(logging.ERROR, "hookline"):
        response = http.post("/v1/completions", json=fields)
    assert response.status_code == 200
    *chunks, last, done = [one.removeprefix("data: ") for one in response.text.split("\n\n") if one]
    assert chunks and done == "[DONE]"
    check_fault(json.loads(last)["error"], "processor 'faulty' of plugin", caplog.text)


def test_a_processor_that_fails_to_make_its_arguments_is_status_500(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.faulty_exit import ProcessorArguments

    monkeypatch.setattr(ProcessorArguments, "__post_init__", failing(crash()))
    with caplog.at_level(logging.ERROR, "hookline"):
        response = http.post("/v1/completions", json={"prompt": CODE, "extra_args": {"faulty": {"amount": 3.0}}})
    assert response.status_code == 500
    check_fault(response.json()["error"], "processor 'faulty' of plugin", caplog.text)


@pytest.mark.parametrize("path", POOLED)
@pytest.mark.parametrize("method", ["accumulate", "finish"])
def test_a_pooler_that_fails_is_status_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, method: str, http: httpx.Client
) -> None:
    pooler, fields = POOLED[path]
    monkeypatch.setattr(pooler, method, failing(crash()))
    with caplog.at_level(logging.ERROR, "hookline"):
        response = http.post(path, json=fields)
    assert response.status_code == 500, response.text
    error = response.json()["error"]
    assert f" fails in {method}" in error["message"]
    check_fault(error, "pooler '", caplog.text)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_grammar_back_end_that_fails_is_status_500(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    monkeypatch.setattr(LLGuidance, "compile", failing(crash()))
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    with caplog.at_level(logging.ERROR, "hookline"):
        response = http.post(path, json={**ENDPOINTS[path], **form})
    assert response.status_code == 500
    check_fault(response.json()["error"], "grammars 'llguidance' of plugin 'grammars' ", caplog.text)


@pytest.mark.parametrize("method", ["encode", "load", "process"])
def test_what_a_processor_refuses_stays_status_400(
    http: httpx.Client, processor: type, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fail = failing(RequestError("not like this"))
    monkeypatch.setattr(processor, method, staticmethod(fail) if method == "encode" else fail)
    response = http.post("/v1/completions", json={"prompt": CODE, **FAULTY})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith("not like this") and "/" not in error["message"]


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        (5, "extra_args: Expected `object | null`, got `int`"),
        ({"faulty": 5}, "extra_args.faulty=5 must be a mapping of the extension's arguments"),
        ({"faulty": {"amount": "2"}}, "extra_args.faulty.amount='2' is a text, not a float"),
        ({"faulty": {"amount": [2]}}, "extra_args.faulty.amount=[2] is not a float"),
    ],
)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_argument_of_a_wrong_type_is_named_by_its_key(
    http: httpx.Client, path: str, extra_args: Any, message: str
) -> None:
    response = http.post(path, json={**ENDPOINTS[path], "extra_args": extra_args})
    error = response.json()["error"]
    assert (response.status_code, error["message"], error["param"]) == (400, message, "extra_args")


def test_openai_s_client_sees_an_error_of_the_server(
    server: LiveServer, processor: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "process", failing(crash()))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    with client, pytest.raises(openai.InternalServerError, match=r"processor 'faulty' .* fails in process"):
        client.completions.create(model=model, prompt=CODE, extra_body=FAULTY)
