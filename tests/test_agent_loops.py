"""OpenAI's Agents SDK, unmodified, with tools and an output type: whole loops with the bundled checkpoint.

Grammars let it call or answer. It never saw a call, so its inclination to call is set by `logit_bias`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from hookline.core.frontend.async_llm import AsyncLLM
from hookline.core.serve.in_process import InProcessClient
from tests.live_server import PARSERS, LiveServer, live_server

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
MODELS = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
TAG = "<tool_call>"


class Forecast(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    sky: Literal["clear", "cloudy"]
    degrees: int = pydantic.Field(ge=-60, le=60)
    is_windy: bool


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    def engine() -> InProcessClient:
        return InProcessClient(AsyncLLM(device="cpu", engine={"cpu_cache_gib": 0.05, "max_num_seqs": 8}), PARSERS)

    with live_server(engine) as started:
        yield started


@pytest.fixture(scope="module")
def tag_bias(server: LiveServer) -> Callable[[float], dict[str, float]]:
    """Makes a bias of the tokens that begin a call in the model's own form."""
    tokenizer = server.client.facts.codec.tokenizer
    begins = [token_id for token, token_id in tokenizer.get_vocab().items() if token and TAG.startswith(token)]
    assert begins
    return lambda bias: dict.fromkeys(map(str, begins), bias)


def looped(server: LiveServer, api: str, is_streamed: bool, **options: Any) -> tuple[Any, list[Any], list[str]]:
    """Run an agent; returns its final output, the arguments of its tool's calls, and the kinds of the items."""
    seen: list[Any] = []

    @agents.function_tool(is_enabled=lambda context, agent: not (options["calls_once"] and seen))
    def get_weather(city: Literal["Paris", "Oslo"], in_celsius: bool) -> str:
        """The weather of a city."""
        seen.append((city, in_celsius))
        return "clear, 21 degrees, no wind"

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            model = MODELS[api](model=server.client.facts.names[0], openai_client=client)
            settings = agents.ModelSettings(temperature=0, max_tokens=400, **options["settings"])
            agent = agents.Agent(
                name="A", tools=[get_weather], output_type=Forecast, model=model, model_settings=settings
            )
            if not is_streamed:
                return await agents.Runner.run(agent, "Which weather has Paris?", max_turns=3)
            streamed = agents.Runner.run_streamed(agent, "Which weather has Paris?", max_turns=3)
            async for _ in streamed.stream_events():
                pass
            return streamed

    agents.set_tracing_disabled(True)
    result = asyncio.run(run())
    return result.final_output, seen, [item.type for item in result.new_items]


@pytest.mark.parametrize("api", MODELS)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_that_must_call_first_calls_and_then_answers_in_its_output_type_with_its_tools_at_hand(
    api: str, is_streamed: bool, server: LiveServer, tag_bias: Callable[[float], dict[str, float]]
) -> None:
    settings = {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"logit_bias": tag_bias(-100)}}
    final, seen, kinds = looped(server, api, is_streamed, settings=settings, calls_once=False)
    assert isinstance(final, Forecast) and len(seen) == 1 and seen[0][0] in ("Paris", "Oslo")
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]


@pytest.mark.parametrize("api", MODELS)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_that_may_call_calls_in_its_model_s_own_form_and_then_answers_in_its_output_type(
    api: str, is_streamed: bool, server: LiveServer, tag_bias: Callable[[float], dict[str, float]]
) -> None:
    settings = {"parallel_tool_calls": False, "extra_body": {"logit_bias": tag_bias(100)}}
    final, seen, kinds = looped(server, api, is_streamed, settings=settings, calls_once=True)
    assert isinstance(final, Forecast) and len(seen) == 1 and seen[0][0] in ("Paris", "Oslo")
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]


@pytest.mark.parametrize("api", MODELS)
def test_an_agent_that_would_rather_answer_does_so_at_once_in_its_output_type(
    api: str, server: LiveServer, tag_bias: Callable[[float], dict[str, float]]
) -> None:
    settings = {"extra_body": {"logit_bias": tag_bias(-100)}}
    final, seen, kinds = looped(server, api, False, settings=settings, calls_once=False)
    assert isinstance(final, Forecast) and not seen and kinds == ["message_output_item"]
