"""The API surfaces of a server: which are chosen, their routes, and which of them a request belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hookline.core.contracts import ApiError, ApiRoute, ApiSurface, ErrorForm
from hookline.core.errors import ConfigError
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.registry import Option
from hookline.core.serve.endpoints.answering import Answers
from hookline.core.serve.endpoints.served_engine import ServedEngine
from hookline.core.serve.errors import response

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Claim:
    """A route of a surface."""

    surface: ApiSurface
    name: str
    """Of the surface's option."""
    route: ApiRoute


class Surfaces:
    """The surfaces of a server around one engine.

    Raises: PluginError or ConfigError for a surface that cannot be used, or if two have the same route.
    """

    def __init__(self, engine: ServedEngine, options: Sequence[Option]) -> None:
        self._max_model_len, self._gzip = engine.facts.max_model_len, engine.settings.gzip
        self.claims = [claim for option in options for claim in _claims(option, engine)]
        self._all = list(dict.fromkeys(claim.surface for claim in self.claims))
        self._by_path: dict[str, list[Claim]] = {}
        for claim in self.claims:
            self._add(claim)
        self._id_headers = {
            claim.route.path: name.lower().encode()
            for claim in self.claims
            if (name := claim.surface.request_id_header) is not None
        }
        self._body_limits = {
            (claim.route.method, claim.route.path): limit
            for claim in self.claims
            if (limit := claim.route.max_body_bytes) is not None
        }

    def _add(self, claim: Claim) -> None:
        others = self._by_path.setdefault(_fixed(claim.route.path), [])
        for other in others:
            if (other.route.method, other.route.path) != (claim.route.method, claim.route.path):
                continue
            if other.surface is claim.surface or other.surface.client_header == claim.surface.client_header:
                raise ConfigError(
                    f"serve.apis: '{other.name}' and '{claim.name}' both serve {claim.route.method} "
                    f"{claim.route.path}; leave out one of the two"
                )
        others.append(claim)

    @property
    def routes(self) -> list[Route]:
        """Starlette's routes. APIs with the same path and method share a route; a request header chooses the API."""
        found: dict[tuple[str, str], list[Claim]] = {}
        for claim in self.claims:
            found.setdefault((claim.route.method, claim.route.path), []).append(claim)
        return [Route(path, self._endpoint(claims), methods=[method]) for (method, path), claims in found.items()]

    def _endpoint(self, claims: Sequence[Claim]) -> Answers | ByHeader:
        answers = [Answers(one.route.endpoint, one.surface.errors, self._max_model_len, self._gzip) for one in claims]
        if len(answers) == 1:
            return answers[0]
        marked = {
            claim.surface.client_header.lower().encode(): answer
            for claim, answer in zip(claims, answers, strict=True)
            if claim.surface.client_header is not None
        }
        plain = [answer for claim, answer in zip(claims, answers, strict=True) if claim.surface.client_header is None]
        return ByHeader(marked, plain[0] if plain else None, self._all[0].errors)

    @property
    def key_headers(self) -> list[bytes]:
        """Headers beside Authorization in which clients send their key."""
        return list({name.lower().encode(): None for one in self._all for name in one.key_headers})

    @property
    def exposed_headers(self) -> list[str]:
        """Further headers that pages of other origins may read."""
        return [name.lower() for one in self._all for name in one.exposed_headers]

    @property
    def methods(self) -> list[str]:
        """The methods of all routes."""
        return list(dict.fromkeys(claim.route.method for claim in self.claims))

    def of(self, path: str, headers: Headers = ()) -> ApiSurface:
        """The surface that a request belongs to: that of the longest route which is its path or above it, else the
        first. The header of an API's clients decides among several.
        """
        while path:
            if claims := self._by_path.get(path):
                return _of_client([claim.surface for claim in claims], headers)
            path = path.rpartition("/")[0]
        return _of_client(self._all, headers)

    def form_of(self, scope: Scope) -> ErrorForm:
        """How errors of a request are written."""
        return self.of(scope["path"], scope["headers"]).errors

    def max_body_bytes(self, scope: Scope) -> int | None:
        """The limit that a route has for bodies; None: that of the server."""
        return self._body_limits.get((scope["method"], scope["path"])) if self._body_limits else None

    def id_headers(self, scope: Scope, id: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """The headers of a response that have the request's id."""
        own = self._id_headers.get(scope["path"])
        return ((b"x-request-id", id),) if own is None else ((b"x-request-id", id), (own, id))


class ByHeader:
    """An endpoint that several surfaces share. otherwise: for clients that send none of the headers; None: 404."""

    def __init__(self, marked: Mapping[bytes, Answers], otherwise: Answers | None, form: ErrorForm) -> None:
        self._marked, self._otherwise, self._form = marked, otherwise, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        sent = {name for name, _ in scope["headers"]}
        answers = next((one for name, one in self._marked.items() if name in sent), self._otherwise)
        if answers is None:
            await response(ApiError(404, "Not Found"), self._form)(scope, receive, send)
            return
        await answers(scope, receive, send)


def _claims(option: Option, engine: ServedEngine) -> Iterator[Claim]:
    assert option.entry is not None
    cls = option.entry.load()
    with Blaming((), "while its routes are made", otherwise=option.entry):
        surface: ApiSurface = cls(option.config, engine)
        routes = list(surface.routes())
    return (Claim(surface, option.name, route) for route in routes)


def _fixed(path: str) -> str:
    """A route's path up to its first parameter: /v1/models of /v1/models/{name:path}."""
    return path.partition("{")[0].rstrip("/") or "/"


def _of_client(surfaces: Sequence[ApiSurface], headers: Headers) -> ApiSurface:
    if len(surfaces) > 1:
        sent = {name for name, _ in headers}
        for one in surfaces:
            if one.client_header is not None and one.client_header.lower().encode() in sent:
                return one
    return next((one for one in surfaces if one.client_header is None), surfaces[0])
