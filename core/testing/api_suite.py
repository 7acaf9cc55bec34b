"""`ApiSuite`: the conformance suite of API surfaces, run on an application around an engine that makes tokens up."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from hookline.core.config.compose import compose
from hookline.core.contracts import ApiError, ApiSurface
from hookline.core.errors import EngineError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import API, Entry, Option, Origin
from hookline.core.serve.endpoints.served_engine import ServedEngine
from hookline.core.serve.http.api_keys import ApiKeys
from hookline.core.serve.http.app import Served, application
from hookline.core.serve.http.surfaces import Surfaces
from hookline.core.serve.settings import ServeConfig, ServeKeys
from hookline.core.testing.checks import check_contract
from hookline.core.testing.engine_client import FakeEngineClient

KEY = "a-key-that-nobody-may-see"
"""The API key of the suite's clients."""
SECRET = "a-secret-of-the-engine"
"""The text of the engine's error, which clients must not see."""
PATIENCE_S = 30.0
"""Longest time in seconds that a request of the suite may take."""


@dataclass(frozen=True)
class Answered:
    """A response: its status, its headers in lower case, and its body. Status 0: the client has left.

    num_open: prompts of the request that the engine still answered when the application was done with it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    num_open: int = 0

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


@dataclass
class _Client:
    """Sends one request to an ASGI application. leaves: disconnect when the body has come."""

    app: Any
    leaves: bool = False
    sent: list[MutableMapping[str, Any]] = field(default_factory=list)

    async def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answered | None:
        fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in fields.items()],
            "client": None,
            "server": None,
        }
        waiting = [{"type": "http.request", "body": body, "more_body": False}]
        if self.leaves:
            waiting.append({"type": "http.disconnect"})

        async def _receive() -> MutableMapping[str, Any]:
            if waiting:
                if len(waiting) == 1 and self.leaves:
                    await asyncio.sleep(0.1)  # the endpoint has begun by then
                return waiting.pop(0)
            await asyncio.Event().wait()
            raise AssertionError("never reached")

        async def _send(message: MutableMapping[str, Any]) -> None:
            self.sent.append(message)

        await asyncio.wait_for(self.app(scope, _receive, _send), PATIENCE_S)
        if not self.sent or self.leaves:
            return None
        found = {name.decode().lower(): value.decode() for name, value in self.sent[0]["headers"]}
        return Answered(self.sent[0]["status"], found, b"".join(one.get("body", b"") for one in self.sent))


class ApiSuite:
    """Subclass it in your tests, set `surface` and `requests`, and pytest runs everything below on it."""

    surface: type[ApiSurface]
    """The class of the surface."""
    config: Any = None
    """An instance of its config dataclass, if it has one."""
    requests: Mapping[str, Mapping[str, Any]]
    """Path -> the body of a request that must be answered with status 200 and generates at least one token, for each
    endpoint that generates."""
    generates: bool = True
    """Whether an endpoint generates; if not, `requests` is empty."""
    model_field: str | None = "model"
    """The field of the body that names the model; None if there is none."""

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        client: FakeEngineClient | None = None,
        settings: ServeConfig | None = None,
        key: str = "",
        headers: Mapping[str, str] | None = None,
        leaves: bool = False,
    ) -> Answered:
        """The answer of an application with this surface alone.

        body: a text is sent unchanged, any other value as JSON. client: makes up the engine's tokens. key: the key that
        clients must send. leaves: the client disconnects when its body has been sent; then the answer is empty.
        """

        async def _ask() -> Answered:
            engine = client or FakeEngineClient()
            served = self.served(engine, settings, key)
            data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
            answer = await _Client(served.app, leaves).ask(method, path, data, headers or {})
            return replace(answer or Answered(0, {}, b""), num_open=engine.num_open)

        return asyncio.run(_ask())

    def served(self, client: FakeEngineClient, settings: ServeConfig | None = None, key: str = "") -> Served:
        """An application with this surface alone, on the running event loop; `app` is ASGI. Its parsers are set in
        conf/serve.yaml. For the arguments see `ask`.
        """
        given, host = settings or ServeConfig(**_parsers()), _host(_plugins())
        entry = Entry(API, "tested", f"{self.surface.__module__}:{self.surface.__qualname__}", _ORIGIN)
        surfaces = Surfaces(ServedEngine(client, given, host), [Option(entry, self.config)])
        return application(client, given, surfaces, ApiKeys([key] if key else ()))

    def test_it_keeps_the_contract(self) -> None:
        """Its constructor and its methods have the signatures of ApiSurface."""
        check_contract(API, self.surface)

    def test_requests_are_answered(self) -> None:
        """Every request of `requests` gets status 200."""
        assert bool(self.requests) == self.generates, "requests is empty, or generates is False"
        for path, body in self.requests.items():
            answer = self.ask("POST", path, body)
            assert answer.status == 200, f"{path}: {answer}"

    def test_a_body_that_cannot_be_read_is_an_error_of_the_client_in_its_form(self) -> None:
        """A body that is not JSON, not an object, or has a field of a wrong type gets status 400 and a message."""
        for path in self.requests:
            for body in ("{", "[]", "3", json.dumps({self.model_field or "model": [{}]})):
                self._check_error(self.ask("POST", path, body), 400, path)

    def test_an_unknown_model_is_not_found(self) -> None:
        """A request for a model that is not served gets status 404."""
        for path, body in self.requests.items() if self.model_field is not None else ():
            self._check_error(self.ask("POST", path, {**body, self.model_field: "no-such-model"}), 404, path)

    def test_a_key_is_needed_and_never_shown(self) -> None:
        """Without the key the status is 401, in the surface's form; each header that the surface names is accepted."""
        for path, body in self.requests.items():
            answer = self.ask("POST", path, body, key=KEY, headers={"Authorization": f"Bearer {KEY}x"})
            self._check_error(answer, 401, path)
            assert KEY not in f"{answer}", "the answer shows the key"
            given = [{"Authorization": f"Bearer {KEY}"}, *({name: KEY} for name in self.surface.key_headers)]
            answers = [self.ask("POST", path, body, key=KEY, headers=headers) for headers in given]
            assert [one.status for one in answers] == [200] * len(given), f"{path}: {given}"

    def test_no_route_is_answered_without_the_key(self) -> None:
        """Every route answers with status 401 without the key, in the surface's form."""
        for path, answer in self._ask_routes(KEY, "{}"):
            self._check_error(answer, 401, path)

    def test_every_route_with_a_body_tells_what_is_wrong_with_it(self) -> None:
        """A body that is not JSON gets a 4xx status, in the surface's form, on each route that describes its body."""
        for path, answer in self._ask_routes("", "{", with_body=True):
            self._check_error(answer, answer.status if 400 <= answer.status < 500 else 400, path)

    def test_a_body_that_is_too_large_is_refused(self) -> None:
        """A body beyond serve.max_body_bytes gets status 413."""
        for path in self.requests:
            answer = self.ask("POST", path, "x" * 2048, settings=ServeConfig(max_body_bytes=1024))
            self._check_error(answer, 413, path)

    def test_a_client_that_leaves_ends_its_requests(self) -> None:
        """A request is aborted when its client's connection is closed."""
        for path, body in self.requests.items():
            client = FakeEngineClient(reply=list(range(100, 1000)), pause_s=0.05)
            answer = self.ask("POST", path, body, client=client, leaves=True)
            assert client.asked, f"{path}: nothing was asked of the engine before the client left"
            assert answer.num_open == 0, f"{path}: {answer.num_open} prompts are still answered"

    def test_a_failure_of_the_engine_is_told_without_details(self) -> None:
        """An engine's failure gets status 500 or more, in the surface's form, without the text of its error."""
        for path, body in self.requests.items():
            answer = self.ask("POST", path, body, client=FakeEngineClient(error=EngineError(SECRET)))
            assert SECRET not in f"{answer}", f"{path}: the answer shows the error of the engine"
            assert answer.status >= 500 or answer.status == 200, f"{path}: {answer}"

    def _ask_routes(self, key: str, body: str, *, with_body: bool = False) -> list[tuple[str, Answered]]:
        """Path and answer of each route, with `none` for the parameters in its path. with_body: only routes that
        describe their body.
        """

        async def _ask() -> list[tuple[str, Answered]]:
            engine = FakeEngineClient()
            app = self.served(engine, None, key).app
            surface = self.surface(self.config, ServedEngine(engine, ServeConfig(**_parsers()), _host(_plugins())))
            found = []
            for route in surface.routes():
                path = _PARAMETER.sub("none", route.path)
                if route.body is not None or not with_body:
                    answer = await _Client(app).ask(route.method, path, body.encode(), {})
                    found.append((path, answer or Answered(0, {}, b"")))
            return found

        return asyncio.run(_ask())

    def _check_error(self, answer: Answered, status: int, path: str) -> None:
        assert answer.status == status, f"{path}: {answer}, not {status}"
        keys = set(self.surface.errors.body(ApiError(status, "x")))
        assert keys <= set(answer.json), f"{path}: {answer.body!r} does not have the keys {sorted(keys)} of the form"


_PARAMETER = re.compile(r"\{[^}]*\}")
_ORIGIN = Origin("tested", "tested", "tested", "0")


def _plugins() -> str:
    return os.environ.get("HOOKLINE_PLUGINS", "")


@cache
def _host(plugins: str) -> PluginHost:
    """The plugins of this process; cached, as loading them takes longer than a request. plugins: HOOKLINE_PLUGINS."""
    return PluginHost.load()


@cache
def _parsers() -> dict[str, Any]:
    """The parsers of a server by default."""
    told = compose([], _host(""), ServeKeys, "serve")[0].tree["serve"]
    return {name: told[name] for name in ("reasoning_parser", "tool_parser")}
