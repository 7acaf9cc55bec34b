"""API surfaces: which are served, whose request it is, and what a surface declares of its routes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hookline.core.contracts import ApiError, ApiRoute, ApiSurface, ErrorForm
from hookline.core.errors import ConfigError, PluginError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import API, Entry, Option, Origin
from hookline.core.serve.apis import chosen_apis
from hookline.core.serve.endpoints.served_engine import ServedEngine
from hookline.core.serve.http.api_keys import ApiKeys
from hookline.core.serve.http.app import make_app
from hookline.core.serve.http.openapi import document
from hookline.core.serve.http.surfaces import Surfaces
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient

ORIGIN = Origin("mine", __name__, "hookline-mine", "1")
ROOT = Path(__file__).parents[4]


class Short(ErrorForm):
    def body(self, error: ApiError) -> dict[str, object]:
        return {"no": error.message}

    def frames(self, error: ApiError) -> bytes:
        return b""


class Echo(ApiSurface):
    errors = Short()
    key_headers = ("X-Echo-Key",)
    request_id_header = "Echo-Id"
    exposed_headers = ("Echo-Id",)

    def __init__(self, config: Any, engine: ServedEngine) -> None:
        self.engine = engine

    def routes(self) -> list[ApiRoute]:
        return [ApiRoute("POST", "/echo", self.echo, "Say it again", max_body_bytes=10), self.delete()]

    def delete(self) -> ApiRoute:
        return ApiRoute("DELETE", "/echo/{name}", self.echo)

    async def echo(self, request: Request) -> Response:
        body = (await request.body()).decode()
        if body == "bug":
            raise ZeroDivisionError("a secret")
        return JSONResponse({"said": body, "name": self.engine.model_name(None), "id": request.state.request_id})


class Marked(Echo):
    """Has the same paths, for clients that send a header."""

    client_header = "X-Marked"

    async def echo(self, request: Request) -> Response:
        return JSONResponse({"marked": True})


class Broken(Echo):
    def routes(self) -> list[ApiRoute]:
        raise ValueError("no routes today")


def option(name: str) -> Option:
    return Option(Entry(API, name.lower(), f"{__name__}:{name}", ORIGIN))


def send(
    *names: str,
    method: str = "POST",
    path: str = "/echo",
    keys: tuple[str, ...] = (),
    monkeypatch: pytest.MonkeyPatch,
    cors: tuple[str, ...] = (),
    **options: Any,
) -> httpx.Response:
    monkeypatch.setattr("hookline.core.serve.http.app.chosen_apis", lambda given, host: [option(one) for one in names])

    async def _send() -> httpx.Response:
        served = make_app(FakeEngineClient(), ServeConfig(cors_origins=cors), ApiKeys(keys), host=PluginHost())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://here") as http:
            return await http.request(method, path, **options)

    return asyncio.run(_send())


def test_a_surface_has_its_routes_and_the_request_s_id(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = send("Echo", monkeypatch=monkeypatch, content="hi", headers={"X-Request-Id": "abc"})
    assert answer.json() == {"said": "hi", "name": "fake", "id": "abc"}
    assert (answer.headers["x-request-id"], answer.headers["echo-id"]) == ("abc", "abc")
    assert send("Echo", monkeypatch=monkeypatch, method="DELETE", path="/echo/x").status_code == 200


def test_a_bug_of_an_endpoint_is_500_in_the_surface_s_form_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = send("Echo", monkeypatch=monkeypatch, content="bug")
    assert (answer.status_code, answer.json()) == (500, {"no": "internal server error"})


@pytest.mark.parametrize(("path", "status"), [("/echo", 413), ("/nowhere", 404)])
def test_errors_before_any_endpoint_have_the_first_surface_s_form(
    monkeypatch: pytest.MonkeyPatch, path: str, status: int
) -> None:
    answer = send("Echo", monkeypatch=monkeypatch, path=path, content="more than ten bytes")
    assert (answer.status_code, list(answer.json())) == (status, ["no"])


def test_a_route_s_own_limit_of_bodies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert send("Echo", monkeypatch=monkeypatch, content="0123456789").status_code == 200
    answer = send("Echo", monkeypatch=monkeypatch, content="0123456789a")
    assert answer.json() == {"no": "the body is larger than the 10 bytes that this endpoint takes"}


def test_a_surface_s_header_of_keys_is_read_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [{"X-Echo-Key": "k"}, {"Authorization": "Bearer k"}, {"X-API-Key": "k"}, {}]
    answers = [send("Echo", monkeypatch=monkeypatch, keys=("k",), headers=one) for one in given]
    assert [one.status_code for one in answers] == [200, 200, 401, 401]


def test_a_header_tells_clients_of_the_same_path_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = send("Echo", "Marked", monkeypatch=monkeypatch, headers={"x-marked": "1"})
    plain = send("Echo", "Marked", monkeypatch=monkeypatch)
    assert (marked.json(), plain.json()["said"]) == ({"marked": True}, "")


def test_pages_of_other_origins_may_use_what_surfaces_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"Origin": "http://a", "Access-Control-Request-Method": "DELETE"}
    answer = send("Echo", monkeypatch=monkeypatch, method="OPTIONS", path="/echo/x", cors=("http://a",), headers=asked)
    assert (answer.status_code, "DELETE" in answer.headers["access-control-allow-methods"]) == (200, True)
    answer = send("Echo", monkeypatch=monkeypatch, cors=("http://a",), headers={"Origin": "http://a"})
    assert "echo-id" in answer.headers["access-control-expose-headers"]


def test_two_surfaces_with_the_same_route_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'echo' and 'echo' both serve POST /echo; leave out one of the two"):
        send("Echo", "Echo", monkeypatch=monkeypatch)


def test_a_surface_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match=r"api 'broken' of plugin 'mine' .* no routes today"):
        send("Broken", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["opnai"], "No api named 'opnai'. Did you mean 'openai'?"),
        ([], "serve.apis=[] names no API; there are: anthropic, batches, openai"),
        (["openai", "openai"], "serve.apis names 'openai' twice"),
        ([{"name": "openai", "x": 1}], "unknown key 'serve.apis.openai.x'"),
        ([3], "serve.apis=3 is not a mapping"),
    ],
)
def test_a_wrong_value_of_serve_apis_is_told(given: list[Any], message: str) -> None:
    with pytest.raises((ConfigError, PluginError)) as error:
        chosen_apis(given, PluginHost.load(environ={}))
    assert message.lower() in str(error.value).lower()


def test_the_surfaces_that_ask_for_it_are_served_where_nothing_is_said() -> None:
    names = [one.name for one in chosen_apis(None, PluginHost.load(environ={}))]
    assert names[:2] == ["openai", "anthropic"]


@pytest.mark.slow
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_surface_that_is_not_enabled_is_not_imported(api: str) -> None:
    code = f"""
import sys
from hookline.core.serve.http.app import surfaces_of
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient
surfaces_of(FakeEngineClient(), ServeConfig(apis=["{api}"]))
found = {{name.split(".")[3] for name in sys.modules if name.startswith("hookline.plugins.apis.")}}
assert found == {{"{api}"}}, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_document_describes_the_routes_that_have_a_summary() -> None:
    surfaces = Surfaces(ServedEngine(FakeEngineClient(), ServeConfig(), PluginHost()), [option("Echo")])
    paths = document(surfaces)["paths"]
    assert paths["/echo"]["post"]["summary"] == "Say it again" and "/echo/{name}" not in paths


def test_with_any_model_a_request_for_another_gets_the_served_one() -> None:
    engine = ServedEngine(FakeEngineClient(), ServeConfig(any_model=True), PluginHost())
    assert [engine.model_name(one) for one in ("gpt-4o", "fake", None)] == ["fake"] * 3
    with pytest.raises(ApiError, match="The model `gpt-4o` does not exist"):
        ServedEngine(FakeEngineClient(), ServeConfig(), PluginHost()).model_name("gpt-4o")


def test_the_page_says_what_it_needs_where_the_api_that_it_speaks_is_not_served() -> None:
    def _page(*apis: str) -> httpx.Response:
        async def _get() -> httpx.Response:
            transport = httpx.ASGITransport(make_app(FakeEngineClient(), ServeConfig(apis=apis)).app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.get("/")

        return asyncio.run(_get())

    assert "name openai in serve.apis" in _page("anthropic").text
    assert "<!doctype html>" in _page("anthropic", "openai").text.lower()
