"""The API surfaces that ship, against their conformance suite, and faults that the suite must find."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from hookline.core.contracts import ApiError, ApiRoute
from hookline.core.serving import SAME_NAMES, read
from hookline.core.testing.api_suite import ApiSuite
from hookline.core.testing.running import failures
from hookline.plugins.apis import BatchesConfig
from hookline.plugins.apis.anthropic.surface import Anthropic
from hookline.plugins.apis.batches.surface import Batches
from hookline.plugins.apis.openai.completion_request import CompletionRequest
from hookline.plugins.apis.openai.surface import OpenAI

MESSAGES = [{"role": "user", "content": "Hello"}]


class TestOpenAI(ApiSuite):
    surface = OpenAI
    requests: ClassVar[dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hello"},
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/responses": {"input": "Hello"},
    }


class TestAnthropic(ApiSuite):
    surface = Anthropic
    requests: ClassVar[dict[str, Any]] = {"/v1/messages": {"messages": MESSAGES, "max_tokens": 8}}

    def test_a_response_has_the_request_s_id_under_both_names(self) -> None:
        for path, status in (("/v1/messages", 200), ("/v1/messages/none", 404)):
            answer = self.ask("POST", path, self.requests["/v1/messages"], headers={"X-Request-Id": "mine"})
            assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")
        assert self.ask("GET", "/v1/models").headers["request-id"]


class TestBatches(ApiSuite):
    surface, requests, generates = Batches, {}, False

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.config = BatchesConfig(folder=str(tmp_path))


class OneEndpoint(OpenAI):
    """A surface with one endpoint, which the faults below have in their own way."""

    def routes(self) -> list[ApiRoute]:
        return [one for one in super().routes() if one.path == "/v1/completions"]


class TellsAll(OneEndpoint):
    """Answers an error of the engine with its words."""

    def routes(self) -> list[ApiRoute]:
        async def _all(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ApiError:
                raise
            except Exception as error:
                raise ApiError(500, str(error)) from error

        [route] = super().routes()
        endpoint = route.endpoint
        return [ApiRoute("POST", route.path, _all)]


class Forgets(OneEndpoint):
    """Leaves what it has begun to itself."""

    def routes(self) -> list[ApiRoute]:
        return [ApiRoute("POST", "/v1/completions", self._forget)]

    async def _forget(self, request: Request) -> Response:
        fields, _ = await read(request, CompletionRequest)
        self._engine.model_name(fields.model)
        ids = await self._engine.token_ids(fields.prompts)
        generation = await self._engine.open(fields.asked(ids, 100, None, SAME_NAMES), fields, request.headers)
        ((output,),) = await asyncio.shield(asyncio.ensure_future(generation.outputs()))
        return PlainTextResponse(output.text)


class TakesAnyModel(OneEndpoint):
    def __init__(self, config, engine) -> None:
        super().__init__(config, engine)
        engine.model_name = lambda asked: "any"


class OwnErrors(OneEndpoint):
    def routes(self) -> list[ApiRoute]:
        async def _own(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ApiError as error:
                return Response(b'{"oh": "no"}', error.status)

        [route] = super().routes()
        endpoint = route.endpoint
        return [ApiRoute("POST", route.path, _own)]


class OwnRouteErrors(OneEndpoint):
    """Has an endpoint that generates nothing and writes errors in a form of its own."""

    def routes(self) -> list[ApiRoute]:
        async def _own(request: Request) -> Response:
            return Response(b'{"oh": "no"}', 400)

        return [*super().routes(), ApiRoute("POST", "/v1/own/{id}", _own, body=CompletionRequest)]


class UnreadKeys(OneEndpoint):
    """Names a body that it does not answer, and has a status of success for what is wrong."""

    def routes(self) -> list[ApiRoute]:
        async def _fine(request: Request) -> Response:
            await request.body()
            return Response(b"{}", 200)

        return [ApiRoute("POST", "/v1/completions", _fine)]


@pytest.mark.parametrize(
    ("surface", "found"),
    [
        (OneEndpoint, ""),
        (TellsAll, "test_a_failure_of_the_engine_is_told_without_details"),
        (Forgets, "test_a_client_that_leaves_ends_its_requests"),
        (TakesAnyModel, "test_an_unknown_model_is_not_found"),
        (OwnErrors, "test_a_body_that_cannot_be_read_is_an_error_of_the_client_in_its_form"),
        (OwnRouteErrors, "test_every_route_with_a_body_tells_what_is_wrong_with_it"),
        (UnreadKeys, "test_a_body_that_cannot_be_read_is_an_error_of_the_client_in_its_form"),
    ],
)
def test_the_suite_finds_the_fault(surface: type[OpenAI], found: str) -> None:
    class Suite(ApiSuite):
        requests: ClassVar[dict[str, Any]] = {"/v1/completions": {"prompt": "Hello", "max_tokens": 50}}

    Suite.surface = surface
    names = {str(one).partition(":")[0] for one in failures(Suite)}
    assert found in names if found else not names, failures(Suite)
