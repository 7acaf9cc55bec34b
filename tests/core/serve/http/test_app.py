"""The application around a fake engine client: what every request passes, and the endpoints of operators."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from hookline.core.errors import HooklineError
from hookline.core.serve.engine_client import EngineLoad
from hookline.core.serve.http.api_keys import ApiKeys, a_key, read_keys
from hookline.core.serve.http.app import Served, make_app
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient
from tests.core.serve.conftest import Ask

KEY = "sk-right"


def test_health_is_empty_and_200_while_the_engine_lives(ask: Ask) -> None:
    response = ask(FakeEngineClient(), "GET", "/health")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_a_dead_engine_is_503(ask: Ask, path: str) -> None:
    client = FakeEngineClient(death="it broke", is_ready=False)
    assert ask(client, "GET", path).status_code == 503


def test_ready_is_503_while_the_server_drains_and_health_is_not() -> None:
    served = make_app(FakeEngineClient(), ServeConfig())
    served.life.is_draining = True
    assert [status(served, "GET", path) for path in ("/ready", "/health")] == [503, 200]


def test_a_request_that_comes_while_the_server_drains_is_told_to_come_again() -> None:
    served = make_app(FakeEngineClient(), ServeConfig())
    served.life.is_draining = True
    assert status(served, "POST", "/v1/completions") == 503


def test_headers_of_somebody_in_front_stand_in_the_place_of_the_request_s_id() -> None:
    async def headers_of(headers: Any) -> httpx.Headers:
        transport = httpx.ASGITransport(make_app(FakeEngineClient(), ServeConfig(), None, headers).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return (await http.get("/health")).headers

    assert "x-request-id" in asyncio.run(headers_of(None))
    found = asyncio.run(headers_of(((b"x-hookline-replica", b"a"),)))
    assert found["x-hookline-replica"] == "a" and "x-request-id" not in found


def test_the_load_is_the_engine_s(ask: Ask) -> None:
    client = FakeEngineClient(now=EngineLoad(3, 2, 10, 20, 5.0, 7.5))
    found = ask(client, "GET", "/load").json()
    assert (found["server_load"], found["num_running"], found["num_free_blocks"]) == (5, 3, 10)
    assert found["tokens_s"] == 7.5


class Measured(FakeEngineClient):
    text = '# HELP fake_total Nothing.\n# TYPE fake_total counter\nfake_total{a="b"} 3.0\nfake_created{a="b"} 5.0\n'

    async def metrics(self) -> str:
        return self.text


def test_metrics_are_the_engine_s_and_those_of_http_as_text() -> None:
    served = make_app(Measured(), ServeConfig())
    asked = [("GET", "/health"), ("GET", "/v1/models/a/b"), ("GET", "/v1/nowhere/1"), ("POST", "/v1/completions")]
    assert [status(served, *one) for one in asked] == [200, 404, 404, 400]
    found = answer(served, "GET", "/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {
        (one.name, *map(one.labels.get, ("method", "path", "status"))): one.value
        for family in text_string_to_metric_families(found.text)
        for one in family.samples
    }
    assert values["fake_total", None, None, None] == 3.0 and "_created{" not in found.text.partition("hookline_")[0]
    name = "hookline_http_requests_total"
    assert values[name, "GET", "/health", "200"] == values[name, "GET", "/v1/models/{name}", "404"] == 1
    assert values[name, "GET", "other", "404"] == values[name, "POST", "/v1/completions", "400"] == 1
    assert values["hookline_http_request_duration_seconds_count", None, "/health", None] == 1


def test_metrics_come_as_openmetrics_and_compressed_if_asked_for(ask: Ask) -> None:
    headers = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}
    found = ask(Measured(), "GET", "/metrics", headers=headers)
    assert found.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert found.headers["content-encoding"] == "gzip" and found.text.endswith("# EOF\n")
    assert {one.name for one in openmetrics_families(found.text)} >= {"fake", "hookline_http_requests"}


def test_answers_are_compressed_by_a_key_for_clients_that_accept_it_and_streams_never_are(ask: Ask) -> None:
    def got(settings: ServeConfig, accepts: str = "gzip", **body: Any) -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 400, **body}
        client = FakeEngineClient(" word" * 400)
        return ask(client, "POST", "/v1/completions", settings, json=body, headers={"Accept-Encoding": accepts})

    plain, zipped = got(ServeConfig()), got(ServeConfig(gzip=True))
    assert "content-encoding" not in plain.headers and len(plain.content) > 1500
    assert zipped.headers["content-encoding"] == "gzip" and zipped.headers["vary"] == "Accept-Encoding"
    assert int(zipped.headers["content-length"]) < len(plain.content) / 3
    assert zipped.json()["choices"] == plain.json()["choices"] and zipped.headers["x-request-id"]
    for whole in (got(ServeConfig(gzip=True), "identity"), got(ServeConfig(gzip=True), stream=True)):
        assert "content-encoding" not in whole.headers and len(whole.content) > 1500
    assert "content-encoding" not in got(ServeConfig(gzip=True), max_tokens=1).headers


def test_metrics_of_an_observer_that_are_no_metrics_are_an_error_with_the_reason(ask: Ask) -> None:
    client = Measured()
    client.text = "a{b 1\n"
    found = ask(client, "GET", "/metrics")
    assert found.status_code == 500 and "Prometheus' text format" in found.json()["error"]["message"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
def test_promtool_finds_nothing_to_complain_of() -> None:
    served = make_app(Measured(), ServeConfig())
    answer(served, "GET", "/health")
    text = answer(served, "GET", "/metrics").text
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.parametrize(("method", "path", "code"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_what_is_not_there_is_an_error_in_json(ask: Ask, method: str, path: str, code: int) -> None:
    response = ask(FakeEngineClient(), method, path)
    assert response.status_code == code and response.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"X-API-Key": ""}])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/load", "/version"])
def test_without_its_key_a_request_learns_nothing(ask: Ask, headers: dict[str, str], path: str) -> None:
    response = ask(FakeEngineClient(), "GET", path, keys=(KEY, "other"), headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"bearer {KEY}"},
        {"X-API-Key": KEY},
        {"X-API-Key": KEY, "Authorization": "Bearer of-a-proxy"},
        {"X-API-Key": KEY, "Authorization": "Basic eDp5"},
        {"X-API-Key": "another", "Authorization": f"Bearer {KEY}"},
    ],
)
def test_a_request_with_one_of_the_keys_is_let_in(ask: Ask, headers: dict[str, str]) -> None:
    assert ask(FakeEngineClient(), "GET", "/v1/models", keys=("other", KEY), headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_probes_need_no_key(ask: Ask, path: str) -> None:
    assert ask(FakeEngineClient(), "GET", path, keys=(KEY,)).status_code == 200


def test_keys_come_from_a_file_and_from_the_environment(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the office\n\n one \ntwo\n")
    path.chmod(0o600)
    keys = read_keys(str(path), {"HOOKLINE_API_KEY": "three"})
    accepted = [
        keys.accept([(b"x-api-key", one)], [b"x-api-key"])
        for one in (b"one", b"two", b"three", b"# for the office", b"")
    ]
    assert accepted == [True, True, True, False, False]


def test_the_command_to_try_sends_a_key_that_the_server_takes(tmp_path, monkeypatch) -> None:
    path = tmp_path / "the office's keys"
    path.write_text("# for the office\n\none\ntwo\n")
    path.chmod(0o600)
    monkeypatch.delenv("HOOKLINE_API_KEY", raising=False)
    assert a_key(None) is None
    shown = subprocess.run(["sh", "-c", f'printf %s "{a_key(str(path))}"'], capture_output=True, check=True).stdout
    assert read_keys(str(path)).accept([(b"authorization", b"Bearer " + shown)]) and shown == b"one"
    monkeypatch.setenv("HOOKLINE_API_KEY", "three")
    assert a_key(str(path)) == "$HOOKLINE_API_KEY"


def test_a_file_of_keys_may_begin_with_a_byte_order_mark(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n", encoding="utf-8-sig")
    path.chmod(0o600)
    assert read_keys(str(path), {}).accept([(b"x-api-key", b"one")], [b"x-api-key"])


def test_a_file_without_keys_is_refused(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(HooklineError, match="holds no key"):
        read_keys(str(path), {})


def test_a_file_of_keys_that_everybody_can_read_is_worth_a_warning(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    path.chmod(0o644)
    read_keys(str(path), {})
    assert "chmod 600" in caplog.text and "one\n" not in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "options"),
    [
        ("POST", "/v1/messages", 401, "authentication_error", {"keys": (KEY,)}),
        ("POST", "/v1/messages", 413, "request_too_large", {"content": b"x" * 101}),
        ("POST", "/v1/messages/count_tokens", 413, "request_too_large", {"content": b"x" * 101}),
        ("GET", "/v1/messages", 405, "invalid_request_error", {}),
        ("POST", "/v1/messages/nowhere", 404, "not_found_error", {}),
    ],
)
def test_errors_before_the_endpoint_have_anthropics_form_below_v1_messages(
    ask: Ask, method: str, path: str, status: int, kind: str, options: dict[str, Any]
) -> None:
    response = ask(FakeEngineClient(), method, path, ServeConfig(max_body_bytes=100), **options)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"]["message"]


# ---------------------------------------------------------------------------------------------------- ids and limits


def test_a_request_id_is_echoed(ask: Ask) -> None:
    assert (
        ask(FakeEngineClient(), "GET", "/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    )


@pytest.mark.parametrize("given", ["x" * 129, "two words", ""])
def test_a_request_id_that_would_spoil_a_log_is_replaced(ask: Ask, given: str) -> None:
    found = ask(FakeEngineClient(), "GET", "/health", headers={"X-Request-Id": given}).headers["x-request-id"]
    assert found != given and len(found) == 32


def test_a_path_is_logged_escaped_and_short(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hookline.access"):
        ask(FakeEngineClient(), "GET", "/%1b[2J%0a" + "x" * 5000)
    (line,) = [one.getMessage() for one in caplog.records if one.name == "hookline.access"]
    assert line.isprintable() and len(line) < 400 and "/\\x1b[2J" in line


def test_the_access_log_has_the_id_and_nothing_of_the_prompt(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "my secret", "max_tokens": 2}
    with caplog.at_level(logging.INFO, "hookline.access"):
        ask(FakeEngineClient(), "POST", "/v1/completions?key=secret", headers={"X-Request-Id": "abc-1"}, json=body)
    (line,) = [one.getMessage() for one in caplog.records if one.name == "hookline.access"]
    assert "POST /v1/completions 200" in line and line.endswith("abc-1") and "secret" not in line


def access(ask: Ask, caplog: pytest.LogCaptureFixture, *request: Any, **options: Any) -> list[logging.LogRecord]:
    with caplog.at_level(logging.INFO, "hookline.access"):
        ask(FakeEngineClient(), *request, **options)
    return [one for one in caplog.records if one.name == "hookline.access"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_log_has_tokens_and_times(ask: Ask, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "stream": stream}
    (record,) = access(ask, caplog, "POST", "/v1/completions", json=body)
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["status"], fields["prompt"], fields["output"]) == (200, 3, 2)
    assert 0 <= fields["first_token_s"] <= fields["seconds"] + 0.001
    assert "prompt=3" in record.getMessage() and "output=2" in record.getMessage()


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens=-1 must be at least 1"),
        ("/v1/messages", {"max_tokens": 1}, 400, "messages"),
        ("/nowhere", {}, 404, "nothing is served at this path. /docs lists all paths"),
        ("/chat/completions", {}, 404, "nothing is served at this path. Did you mean '/v1/chat/completions'?"),
        ("/v1/models", {}, 405, "this path takes GET, HEAD alone"),
        ("/v1/completions", {"prompt": "x" * 100}, 413, "serve.max_body_bytes=90"),
    ],
)
def test_the_access_log_says_why_a_request_was_refused(
    ask: Ask, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], status: int, reason: str
) -> None:
    (record,) = access(ask, caplog, "POST", path, ServeConfig(max_body_bytes=90), json=body)
    assert record.fields["status"] == status and reason in record.fields["reason"]  # type: ignore[attr-defined]
    assert reason in record.getMessage()


def test_probes_and_scrapes_are_logged_only_when_they_fail(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert not access(ask, caplog, "GET", path)
    with caplog.at_level(logging.INFO, "hookline.access"):
        ask(FakeEngineClient(death="it broke", is_ready=False), "GET", "/ready")
        ask(FakeEngineClient(), "GET", "/health", ServeConfig(quiet_paths=()))
    assert [one.fields["path"] for one in caplog.records if one.name == "hookline.access"] == ["/ready", "/health"]


def test_a_body_that_says_it_is_too_large_is_refused_unread(ask: Ask) -> None:
    settings = ServeConfig(max_body_bytes=100)
    response = ask(FakeEngineClient(), "POST", "/v1/completions", settings, content=b"x" * 101)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_that_turns_out_too_large_is_refused(ask: Ask) -> None:
    async def pieces():
        for _ in range(3):
            yield b"x" * 50

    response = ask(FakeEngineClient(), "POST", "/v1/completions", ServeConfig(max_body_bytes=100), content=pieces())
    assert response.status_code == 413


def test_a_bug_of_ours_shows_the_client_a_number_and_the_log_the_rest(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeEngineClient()
    client.load = lambda: 1 // 0  # type: ignore[assignment]
    response = ask(client, "GET", "/load", headers={"X-Request-Id": "abc-1"})
    assert response.status_code == 500 and "ZeroDivision" not in response.text and "abc-1" in response.text
    assert "ZeroDivisionError" in caplog.text and "abc-1" in caplog.text


# ------------------------------------------------------------------------------------------------------------ cors


def test_other_origins_are_told_nothing_by_default(ask: Ask) -> None:
    response = ask(FakeEngineClient(), "GET", "/v1/models", headers={"Origin": "https://example.org"})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("type", ["text/plain", "text/plain; charset=utf-8", "multipart/form-data", ""])
def test_a_page_makes_nothing_that_its_browser_did_not_ask_for(ask: Ask, type: str) -> None:
    """Browsers send such bodies for any page, also to http://localhost, and ask the server first for other types."""
    body, headers = b'{"prompt": "x", "max_tokens": 1}', {"Content-Type": type} if type else {}
    client = FakeEngineClient()
    path, origin = "/v1/completions", {"Origin": "https://example.org"}
    assert ask(client, "POST", path, headers=headers | origin, content=body).status_code == 415 and not client.asked
    allowed = ServeConfig(cors_origins=("https://example.org",))
    assert ask(client, "POST", path, allowed, headers=headers | origin, content=body).status_code == 200
    assert ask(client, "POST", path, headers=headers, content=body).status_code == 200  # curl, for example
    as_json = {"Content-Type": "application/json"}
    assert ask(client, "POST", path, headers=as_json | origin, content=body).status_code == 200


def test_an_origin_that_is_allowed_may_ask_without_its_key_what_it_may_send(ask: Ask) -> None:
    settings = ServeConfig(cors_origins=("https://example.org",))
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    response = ask(FakeEngineClient(), "OPTIONS", "/v1/completions", settings, keys=(KEY,), headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://example.org"


# ---------------------------------------------------------------------------------------------------------- leaving


def test_a_client_that_leaves_ends_what_its_request_runs() -> None:
    client = FakeEngineClient(pause_s=0.001)
    assert leave(client, b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true}') == [True]
    assert client.num_open == 0


def test_a_client_that_leaves_in_its_body_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hookline")
    assert leave(FakeEngineClient(), b'{"prompt": ', is_whole=False) == []
    assert [record.levelname for record in caplog.records if record.name == "hookline"] == []


def test_a_client_that_leaves_a_stream_ends_what_its_request_runs() -> None:
    client = FakeEngineClient(pause_s=0.001)
    assert leave(client, b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true}') == [True]
    assert client.num_open == 0


def leave(client: FakeEngineClient, body: bytes, *, is_whole: bool = True) -> list[bool]:
    """Send a request, leave once the engine has it, or before its body is whole; whether each call was cancelled."""

    async def run() -> list[bool]:
        messages = [{"type": "http.request", "body": body, "more_body": not is_whole}]

        async def receive():
            if messages:
                return messages.pop()
            while is_whole and not client.asked:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message) -> None:
            pass

        await asyncio.wait_for(make_app(client, ServeConfig()).app(scope("POST", "/v1/completions"), receive, send), 30)
        return [one.is_cancelled for one in client.asked]

    return asyncio.run(run())


def answer(served: Served, method: str, path: str, **options: Any) -> httpx.Response:
    """The answer of an application that is asked several times."""

    async def _ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://here") as http:
            return await http.request(method, path, **options)

    return asyncio.run(_ask())


def status(served: Served, method: str, path: str) -> int:
    """The status of a request without a body."""
    found = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    asyncio.run(served.app(scope(method, path), receive, send))
    return found[0]


def scope(method: str, path: str) -> dict:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "root_path": "",
        "http_version": "1.1",
    }


def test_all_keys_are_compared_whichever_fits() -> None:
    assert len(ApiKeys(["a", "b", "c"])) == 3
