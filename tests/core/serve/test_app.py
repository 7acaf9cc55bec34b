"""The application around a fake engine client: the endpoints for whoever runs a server."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from hookline.core.serve.app import make_app
from hookline.core.serve.settings import ServeConfig
from hookline.core.serve.testing import FakeEngineClient


def ask(
    client: FakeEngineClient, method: str, path: str, settings: ServeConfig | None = None, **options: Any
) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(client, settings or ServeConfig()).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.request(method, path, **options)

    return asyncio.run(send())


def completion(client: FakeEngineClient, body: Mapping[str, Any]) -> httpx.Response:
    return ask(client, "POST", "/v1/completions", json=body)


def test_health_is_empty_and_200_while_the_engine_lives() -> None:
    response = ask(FakeEngineClient(), "GET", "/health")
    assert (response.status_code, response.content) == (200, b"")


def test_health_is_503_once_the_engine_is_dead() -> None:
    assert ask(FakeEngineClient(death="it broke"), "GET", "/health").status_code == 503


def test_ready_is_503_while_no_requests_are_taken() -> None:
    assert ask(FakeEngineClient(is_ready=False), "GET", "/ready").status_code == 503


def test_a_model_card_has_the_fields_that_load_generators_read() -> None:
    (card,) = ask(FakeEngineClient(), "GET", "/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 4096)
    assert card["root"]


def test_a_completion_has_the_text_of_the_engine() -> None:
    response = completion(FakeEngineClient(" good morning"), {"prompt": "hello", "max_tokens": 64})
    assert response.json()["choices"][0]["text"] == " good morning"
