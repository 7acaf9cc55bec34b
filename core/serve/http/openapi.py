"""The OpenAPI document, which is made from the routes of the surfaces and the structs of their bodies and answers, and
a page that shows it and sends requests.

The page loads nothing from other servers.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import hookline
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.endpoints.answering import json_response
from hookline.core.serve.endpoints.request_options import CACHE_SALT, DEADLINE, PRIORITY, SESSION, TAGS, TIMEOUT
from hookline.core.serve.http.page import HERE, policy_of
from hookline.core.serve.http.surfaces import Claim, Surfaces
from hookline.core.util.field_docs import field_docs

Values = dict[str, Any]
_GETS = {
    "/health": "200 while the engine lives, else 503",
    "/ready": "200 while requests are taken, else 503",
    "/ping": "As /health",
    "/version": "The server's version",
    "/load": "How busy the engine is",
    "/metrics": "Metrics in Prometheus' text format",
}
_ERRORS = {
    "400": "The request cannot be served as it is; the message names the field",
    "401": "The API key is missing or wrong",
    "404": "The model's name is not one that is served",
    "408": "The request's time limit ended it",
    "413": "The body is too large",
    "429": "The queue is full; Retry-After says when to try again",
    "503": "The engine is not there",
}
_HEADERS = {
    PRIORITY: ("integer", "Lower comes first; wins over the field `priority`"),
    TAGS: ("string", "`key=value, key=value`; wins over the field `tags`"),
    CACHE_SALT: ("string", "Separates prefix caches; wins over the field `cache_salt`"),
    DEADLINE: ("number", "Seconds after which the request should be done"),
    TIMEOUT: ("number", "Seconds after which the request is ended"),
    SESSION: ("string", "Keeps the requests of a session at one replica"),
}
REF = "#/components/schemas/{name}"


def document(surfaces: Surfaces) -> Values:
    """The OpenAPI 3.1 document of a server's endpoints."""
    claims = [claim for claim in surfaces.claims if claim.route.summary]
    kinds = [kind for claim in claims for kind in (claim.route.body, claim.route.answer) if kind is not None]
    references, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    of_kind = dict(zip(kinds, references, strict=True))
    bodies = {claim.route.body for claim in claims}
    for kind, reference in of_kind.items():
        if (schema := schemas.get(_name_in(reference))) is not None:
            _describe(schema, kind, is_body=kind in bodies)
    errors = {claim.surface: f"Error_{claim.name}" for claim in claims}
    schemas |= {name: dict(surface.errors.schema) for surface, name in errors.items()}
    paths: Values = {}
    for claim in claims:
        described = _described(claim, of_kind, errors[claim.surface])
        methods, method = paths.setdefault(_shown(claim.route.path), {}), claim.route.method.lower()
        methods[method] = _either(methods[method], described) if method in methods else described
    for path, summary in _GETS.items():
        answers = {"200": {"description": "It is so"}, "503": {"description": _ERRORS["503"]}}
        paths[path] = {"get": {"summary": summary, "operationId": _operation("get", path), "responses": answers}}
    names = ", ".join(dict.fromkeys(claim.name for claim in surfaces.claims))
    about = {"title": "Hookline", "version": hookline.__version__, "description": f"A server of these APIs: {names}."}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas}}


def _described(claim: Claim, of_kind: dict[type, Any], error: str) -> Values:
    route = claim.route
    found: Values = {"summary": route.summary, "operationId": _operation(route.method, route.path)}
    parameters = [_parameter(name) for name in _parameters(route.path)]
    if route.body is not None:
        content: Values = {"schema": of_kind[route.body]}
        if (example := getattr(route.body, "EXAMPLE", None)) is not None:
            content["example"] = dict(example)
        found["requestBody"] = {"required": True, "content": {"application/json": content}}
        parameters += [_header(name) for name in _HEADERS] if route.streams else []
        found["parameters"] = parameters
    elif parameters:
        found["parameters"] = parameters
    answer = {"type": "object"} if route.answer is None else of_kind[route.answer]
    stream = claim.surface.errors.stream_type.partition(";")[0] if route.streams else None
    return found | {"responses": _responses(answer, error, stream)}


def _name_in(reference: Any) -> str:
    """The name of a schema that is referred to."""
    return str(reference.get("$ref", "")).rpartition("/")[2]


def _parameters(path: str) -> list[str]:
    return re.findall(r"\{(\w+)", path)


def _parameter(name: str) -> Values:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _shown(path: str) -> str:
    """A route's path as OpenAPI writes it: /v1/models/{name} for /v1/models/{name:path}."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _either(first: Values, other: Values) -> Values:
    """Merge the operations of two APIs at the same path, which a header tells apart: the answer has either type."""
    answers = [one["responses"]["200"]["content"]["application/json"] for one in (first, other)]
    merged = {
        **first["responses"]["200"],
        "content": {"application/json": {"schema": {"anyOf": [answer["schema"] for answer in answers]}}},
    }
    return {**first, "responses": {**first["responses"], "200": merged}}


def _describe(schema: Values, kind: type, *, is_body: bool) -> None:
    """Describe the fields by their docstrings; a request's fields without one by SamplingParams' docstrings."""
    docs = (field_docs(SamplingParams) if is_body else {}) | field_docs(kind)
    for name, field in schema.get("properties", {}).items():
        if name in getattr(kind, "IGNORED", ()):
            field["description"] = "Taken and ignored."
        elif name in docs:
            field["description"] = docs[name]


def _header(name: str) -> Values:
    kind, text = _HEADERS[name]
    return {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": kind}}


def _operation(method: str, path: str) -> str:
    name = "_".join(part for part in re.split(r"[^A-Za-z0-9]+", path) if part)
    return name if method == "POST" else f"{method.lower()}_{name}"


def _responses(answer: Values, error: str, stream: str | None) -> Values:
    content: Values = {"application/json": {"schema": answer}}
    if stream is not None:
        content[stream] = {"schema": {"type": "string"}}
    failure = {"application/json": {"schema": {"$ref": REF.format(name=error)}}}
    errors = {status: {"description": text, "content": failure} for status, text in _ERRORS.items()}
    return {"200": {"description": "The answer, or its stream of events", "content": content}} | errors


def openapi_routes(surfaces: Surfaces) -> list[Route]:
    """/openapi.json: the document, made when it is first asked for. /docs: the same for people."""
    made = cache(lambda: document(surfaces))

    async def _json(request: Request) -> Response:
        return json_response(made())

    async def _docs(request: Request) -> Response:
        script = (HERE / "docs.js").read_text(encoding="utf-8")
        headers = {"Content-Security-Policy": policy_of(script, _STYLE), "X-Content-Type-Options": "nosniff"}
        return HTMLResponse("".join(_page(made(), script)), headers=headers)

    return [Route("/openapi.json", _json, methods=["GET"]), Route("/docs", _docs, methods=["GET"])]


_STYLE = inspect.cleandoc(
    """
    :root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
    body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
    summary { cursor: pointer; padding: .4rem 0 } code, textarea, output { font: .9em/1.4 ui-monospace, monospace }
    table { border-collapse: collapse; width: 100%; margin-bottom: 1rem } caption { text-align: left; font-weight: 600 }
    td { border-top: 1px solid #8884; padding: .3rem .6rem .3rem 0; vertical-align: top; overflow-wrap: anywhere }
    td:first-child { white-space: nowrap } textarea { box-sizing: border-box; width: 100%; padding: .5rem }
    button, input { font: inherit; padding: .2rem .8rem }
    output { display: block; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24rem; overflow: auto }
    """
)


def _page(document: Values, script: str) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><meta charset="utf-8"><title>Hookline: endpoints</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style><h1>Hookline {html.escape(document['info']['version'])}</h1>"
    yield '<p>All endpoints; <a href="/openapi.json">openapi.json</a> is the same for programs. '
    yield 'Open one to send it a request. <label>API key, if the server has one: <input id="key" type="password" '
    yield 'autocomplete="off"></label></p>'
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<details><summary><code>{method.upper()} {html.escape(path)}</code> "
            yield f"{html.escape(operation['summary'])}</summary>"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            yield from _form(method, path, body)
            answer = operation["responses"]["200"].get("content", {}).get("application/json")
            for caption, one in (("Request", body), ("Answer", answer)):
                yield from () if one is None else _fields(document, caption, one["schema"])
            yield "</details>"
    yield f"<script>{script}</script>"


def _form(method: str, path: str, body: Values | None) -> Iterator[str]:
    """The HTML form that sends a request. A path with parameters has no form: there are no example values for them."""
    if _parameters(path):
        return
    yield f'<form data-method="{method.upper()}" data-path="{html.escape(path)}">'
    if body is not None:
        text = json.dumps(body.get("example", {}), indent=2)
        yield f'<textarea rows="{text.count(chr(10)) + 2}" spellcheck="false" aria-label="Request">'
        yield f"{html.escape(text)}</textarea>"
    yield "<p><button>Send</button></p><output></output></form>"


def _fields(document: Values, caption: str, schema: Values) -> Iterator[str]:
    for one in schema.get("anyOf", [schema]):
        known = document["components"]["schemas"].get(_name_in(one), {})
        if rows := known.get("properties"):
            yield f"<table><caption>{caption}: {html.escape(_name_in(one))}</caption>"
            for field, kind in rows.items():
                text = html.escape(kind.get("description", ""))
                yield f"<tr><td><code>{html.escape(field)}</code><td>{html.escape(_type(kind))}<td>{text}"
            yield "</table>"


def _type(schema: Values) -> str:
    """`string or array of CompletionChoice`."""
    kinds = []
    for one in schema.get("anyOf", [schema]):
        inner = _name_in(one.get("items", {})) if isinstance(one.get("items"), dict) else ""
        kind = _name_in(one) or one.get("type") or ("any" if "enum" not in one and "const" not in one else "string")
        kinds.append(f"{kind} of {inner}" if inner else kind)
    return " or ".join(kind for kind in kinds if kind != "null") or "null"
