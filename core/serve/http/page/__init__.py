"""The page at /: a playground and the engine's state, in one document that loads nothing from elsewhere.

page.html, style.css and the scripts are joined once, when the application is made. The Content-Security-Policy allows
only this script, this style and requests to this server.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hookline.core.serve.engine_client import EngineClient
from hookline.core.serve.http.surfaces import Surfaces

HERE = Path(__file__).parent
LIBRARIES = ("vendor/markdown-it.min.js", "vendor/purify.min.js")
"""Libraries of others, unchanged but for the references to their source maps; their licences lie beside them."""
SCRIPTS = ("stream.js", "markdown.js", "answer.js", "form.js", "engine.js", "playground.js")
"""The scripts, in the order in which they are joined."""


NEEDS = "/v1/completions"
"""An endpoint of the API that the page speaks."""


def page_routes(client: EngineClient, surfaces: Surfaces) -> list[Route]:
    """The page at /, the same for every user and without secrets: the user enters the API key. It speaks OpenAI's API;
    where that is not served, / says so.
    """
    if all(claim.route.path != NEEDS for claim in surfaces.claims):

        async def _needs(request: Request) -> Response:
            text = (
                "The page to try this server speaks OpenAI's API: name openai in serve.apis. /docs has the endpoints.\n"
            )
            return Response(text, media_type="text/plain; charset=utf-8")

        return [Route("/", _needs, methods=["GET"])]
    body, policy = make_page(client.facts.names[0], has_chat=_has_chat(client))
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def _page(request: Request) -> Response:
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)

    return [Route("/", _page, methods=["GET"])]


def make_page(model: str, *, has_chat: bool) -> tuple[bytes, str]:
    """The document, and the Content-Security-Policy that allows nothing else."""
    style = _read("style.css")
    libraries = "\n".join(_read(name) for name in LIBRARIES)
    script = libraries + '\n(() => {\n"use strict";\n' + "\n".join(_read(name) for name in SCRIPTS) + "})();\n"
    text = _read("page.html")
    for mark, value in (
        ("{{model}}", html.escape(model)),
        ("{{mode}}", "chat" if has_chat else "completion"),
        ("{{style}}", style),
        ("{{script}}", script),
    ):
        assert text.count(mark) == 1, mark
        text = text.replace(mark, value)
    return text.encode(), policy_of(script, style)


def policy_of(script: str, style: str) -> str:
    """The Content-Security-Policy of a page that has this script and this style, and asks this server alone."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _has_chat(client: EngineClient) -> bool:
    return bool(getattr(client.facts.codec.tokenizer, "chat_template", None))


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
