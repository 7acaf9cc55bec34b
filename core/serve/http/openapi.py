"""The OpenAPI document, which is made from the structs of the requests, and a page that shows it.

The page loads nothing from other servers.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import hookline
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.anthropic.request import CountRequest, MessagesRequest
from hookline.core.serve.endpoints.answering import json_response
from hookline.core.serve.endpoints.request_options import CACHE_SALT, DEADLINE, PRIORITY, SESSION, TAGS, TIMEOUT
from hookline.core.serve.endpoints.surface import Surface
from hookline.core.serve.openai.chat_request import ChatRequest
from hookline.core.serve.openai.completion_request import CompletionRequest
from hookline.core.serve.openai.embeddings import EmbeddingsRequest
from hookline.core.serve.openai.responses_request import ResponsesRequest
from hookline.core.serve.openai.scores import RerankRequest, ScoreRequest
from hookline.core.serve.openai.tokens import DetokenizeRequest, TokenizeRequest
from hookline.core.util.field_docs import field_docs

Values = dict[str, Any]
_STREAMS = "text/event-stream"
_POSTS: dict[str, tuple[type[msgspec.Struct], str, bool]] = {
    "/v1/completions": (CompletionRequest, "Go on with a text", True),
    "/v1/chat/completions": (ChatRequest, "Answer messages", True),
    "/v1/responses": (ResponsesRequest, "Answer a conversation with items; nothing is kept", True),
    "/v1/messages": (MessagesRequest, "Answer messages, in Anthropic's form", True),
    "/v1/messages/count_tokens": (CountRequest, "Count a prompt's tokens, in Anthropic's form", False),
    "/v1/embeddings": (EmbeddingsRequest, "Vectors of texts", False),
    "/score": (ScoreRequest, "How well documents answer a query", False),
    "/rerank": (RerankRequest, "Documents in the order of how well they answer a query", False),
    "/tokenize": (TokenizeRequest, "Token ids of a text or of messages", False),
    "/detokenize": (DetokenizeRequest, "The text of token ids", False),
}
"""Path -> the struct of its request, its description, and whether it streams."""
_GETS = {
    "/v1/models": "The model's card under each of its names",
    "/tokenizer_info": "What the tokenizer was made with",
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


@cache
def document(*, tokenizer_info: bool) -> Values:
    """The OpenAPI 3.1 document, made when it is first asked for. tokenizer_info: whether that endpoint is served."""
    kinds = [kind for kind, _, _ in _POSTS.values()]
    references, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    for kind in kinds:
        _describe(schemas[kind.__name__], kind)
    schemas["Error"] = _error_schema()
    paths: Values = {}
    for (path, (_, summary, streams)), reference in zip(_POSTS.items(), references, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        parameters = [_header(name) for name in _HEADERS] if streams else []
        operation = {"summary": summary, "operationId": _operation(path), "requestBody": body}
        paths[path] = {"post": operation | {"parameters": parameters, "responses": _responses(streams=streams)}}
    for path, summary in _GETS.items():
        if path != "/tokenizer_info" or tokenizer_info:
            answers = {"200": {"description": "It is so"}, "503": {"description": _ERRORS["503"]}}
            paths[path] = {"get": {"summary": summary, "operationId": _operation(path), "responses": answers}}
    about = {"title": "Hookline", "version": hookline.__version__}
    about["description"] = "A server of OpenAI's and Anthropic's APIs."
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas}}


def _describe(schema: Values, kind: type[msgspec.Struct]) -> None:
    """Descriptions of the fields: their docstrings, or those of SamplingParams."""
    docs = field_docs(SamplingParams) | field_docs(kind)
    for name, field in schema.get("properties", {}).items():
        if name in getattr(kind, "IGNORED", ()):
            field["description"] = "Taken and ignored."
        elif name in docs:
            field["description"] = docs[name]


def _error_schema() -> Values:
    text = {"type": ["string", "null"]}
    named = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": {}}
    error = {"type": "object", "required": ["message", "type"], "properties": named}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _header(name: str) -> Values:
    kind, text = _HEADERS[name]
    return {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": kind}}


def _operation(path: str) -> str:
    return path.strip("/").replace("/", "_")


def _responses(*, streams: bool) -> Values:
    content: Values = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content[_STREAMS] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}
    errors = {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    return {"200": {"description": "The answer, or its stream of events", "content": content}} | errors


async def openapi_json(surface: Surface, request: Request) -> Response:
    """The document itself."""
    return json_response(document(tokenizer_info=surface.settings.tokenizer_info))


async def docs_page(surface: Surface, request: Request) -> Response:
    """The document for people."""
    return HTMLResponse("".join(_page(document(tokenizer_info=surface.settings.tokenizer_info))))


_STYLE = inspect.cleandoc(
    """
    :root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
    body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
    summary { cursor: pointer; padding: .4rem 0 } code { font-size: .95em }
    table { border-collapse: collapse; width: 100% } td { border-top: 1px solid #8884; padding: .3rem .6rem .3rem 0;
    vertical-align: top; overflow-wrap: anywhere }
    """
)


def _page(document: Values) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    yield '<!doctype html><html lang="en"><meta charset="utf-8"><title>Hookline: endpoints</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style><h1>Hookline {html.escape(document['info']['version'])}</h1>"
    yield '<p>All endpoints; <a href="/openapi.json">openapi.json</a> is the same for programs.</p>'
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            title = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}"
            body = operation.get("requestBody")
            if body is None:
                yield f"<p>{title}</p>"
                continue
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            yield f"<details><summary>{title}</summary><table>"
            for field, schema in schemas[name]["properties"].items():
                text = html.escape(schema.get("description", ""))
                yield f"<tr><td><code>{html.escape(field)}</code><td>{html.escape(_type(schema))}<td>{text}"
            yield "</table></details>"


def _type(schema: Values) -> str:
    """`string or array`."""
    kinds = [one.get("type", "object") for one in schema.get("anyOf", [schema])]
    return " or ".join(kind for kind in kinds if kind != "null")
