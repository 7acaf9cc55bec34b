"""Step extensions from end to end: what they change and tell is what transformers' layers say, whatever computes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.errors import EngineError, HooklineError
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.serve.in_process import InProcessClient
from hookline.core.serve.settings import ServeConfig
from tests import probing_extension
from tests.hf_models import make_qwen3
from tests.live_server import live_server
from tests.test_pooling_parity import random_prompts

PROMPTS = random_prompts()
NUM_TOKENS = 6
STRENGTHS = [0.0, 0.8, -0.6, 0.0, 1.5]
ENGINE = dict(num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("qwen3")
    return str(folder), make_qwen3(folder, num_hidden_layers=4)


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.probing_extension")
    probing_extension.FORGOTTEN.clear()
    yield


def llm_of(checkpoint: Any, **options: Any) -> LLM:
    engine = {**ENGINE, **options.pop("engine", {})}
    return LLM(model={"name": "qwen3", "checkpoint": checkpoint[0]}, device="cpu", engine=engine, **options)


def greedy(**probe: Any) -> SamplingParams:
    extra_args = {"probe": probe} if probe else {}
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=extra_args)


def params(num_prompts: int) -> list[SamplingParams]:
    """Every other one uses the extension, and those of strength 0 do not."""
    strengths = [STRENGTHS[place % len(STRENGTHS)] for place in range(num_prompts)]
    return [greedy(strength=strength) if strength else greedy() for strength in strengths]


@torch.no_grad()
def expected(model: Any, prompt: list[int], strength: float) -> tuple[list[int], list[dict[str, Any]]]:
    """Greedy tokens of transformers with the direction added after layer 1, and what Probe tells of each."""
    states: dict[int, torch.Tensor] = {}

    def hook(layer: int) -> Any:
        def see(module: Any, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if layer == 1:
                hidden = hidden + strength * probing_extension.direction(hidden.shape[-1])
            states[layer] = hidden[0, -1]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return see

    hooks = [model.model.layers[layer].register_forward_hook(hook(layer)) for layer in (0, 1, 2)]
    tokens, told = list(prompt), []
    for _ in range(NUM_TOKENS):
        token_id = int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        best = int(model.lm_head(model.model.norm(states[0])).argmax())
        sums = [float(states[layer].sum()) for layer in (0, 2)]
        told.append({"token": token_id, "best": best, "sums": sums})
        tokens.append(token_id)
    for one in hooks:
        one.remove()
    return tokens[len(prompt) :], told


def check(checkpoint: Any, outputs: list[RequestOutput], prompts: list[list[int]]) -> None:
    for place, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        strength = STRENGTHS[place % len(STRENGTHS)]
        tokens, told = expected(checkpoint[1], prompt, strength)
        assert output.token_ids == tokens, place
        if not strength:
            assert output.extensions is None
            continue
        assert output.extensions is not None
        found = output.extensions["probe"]
        assert [one["token"] for one in found] == tokens and [one["best"] for one in found] == [
            one["best"] for one in told
        ]
        np.testing.assert_allclose([one["sums"] for one in found], [one["sums"] for one in told], rtol=1e-3, atol=2e-3)


WAYS: dict[str, dict[str, Any]] = {
    "plain": dict(engine=dict(overlap=False)),
    "overlap": dict(engine=dict(overlap=True)),
    "chunks": dict(engine=dict(overlap=True, max_num_batched_tokens=8)),
    "preempting": dict(engine=dict(overlap=True, num_blocks=9)),
    "batch of taps": dict(engine=dict(taps=[1])),
}
RANKS: dict[str, dict[str, Any]] = {
    "tp2": dict(tp=2, engine=dict(overlap=True)),
    "pp2": dict(pp=2, engine=dict(overlap=True)),
    "pp4 in chunks": dict(pp=4, engine=dict(max_num_batched_tokens=8)),
}


@pytest.mark.parametrize("way", WAYS)
def test_requests_get_what_transformers_gives_with_and_without_it(way: str, checkpoint: Any) -> None:
    prompts = PROMPTS[:5]
    with llm_of(checkpoint, **WAYS[way]) as llm:
        outputs = llm.generate(prompts, params(len(prompts)))
    check(checkpoint, outputs, prompts)
    assert len(probing_extension.FORGOTTEN) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("way", RANKS)
def test_several_ranks_and_stages_give_the_same(way: str, checkpoint: Any) -> None:
    prompts = PROMPTS[:5]
    with llm_of(checkpoint, **RANKS[way]) as llm:
        outputs = llm.generate(prompts, params(len(prompts)))
    check(checkpoint, outputs, prompts)


def test_results_are_streamed_with_their_tokens_and_scores(checkpoint: Any) -> None:
    scored = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, extra_args={"probe": {"strength": 0.5}}
    )
    with llm_of(checkpoint) as llm:
        deltas = list(llm.stream(PROMPTS[0], scored))
        prompt_scored = SamplingParams(
            temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1, extra_args={"probe": {"strength": 0.5}}
        )
        (both,) = llm.generate(PROMPTS[0], prompt_scored)
    told = [one["token"] for delta in deltas for one in (delta.extensions or {"probe": []})["probe"]]
    assert told == [token for delta in deltas for token in delta.token_ids] and len(told) == NUM_TOKENS
    assert [one.token_id for delta in deltas for one in delta.logprobs or ()] == told
    assert both.prompt_logprobs is not None and len(both.prompt_logprobs) == len(PROMPTS[0])
    assert both.extensions is not None and [one["token"] for one in both.extensions["probe"]] == both.token_ids


def test_a_cached_prompt_serves_requests_of_equal_arguments_alone(checkpoint: Any) -> None:
    prompt = (PROMPTS[0] * 40)[:40]
    wanted = [greedy(), greedy(strength=0.8), greedy(strength=-0.6), greedy(strength=0.8)]
    with llm_of(checkpoint) as llm:
        outputs = [llm.generate(prompt, one)[0] for one in wanted]
        again = llm.generate(prompt, greedy())[0]
    for output, strength in zip([*outputs, again], [0.0, 0.8, -0.6, 0.8, 0.0], strict=True):
        assert output.token_ids == expected(checkpoint[1], prompt, strength)[0]
    # The extension has a state that follows tokens, so nothing but plain prompts is shared.
    assert [output.num_cached_tokens > 0 for output in [*outputs, again]] == [False, False, False, False, True]


def test_it_forbids_tokens_and_ends_requests(checkpoint: Any) -> None:
    first = expected(checkpoint[1], PROMPTS[0], 0.0)[0][0]
    with llm_of(checkpoint) as llm:
        output, stopped = llm.generate([PROMPTS[0]] * 2, [greedy(forbidden=first), greedy(forbidden=0, stops_after=3)])
    assert first not in output.token_ids and len(output.token_ids) == NUM_TOKENS
    assert stopped.stop_reason == "enough" and len(stopped.token_ids) == 3
    assert stopped.extensions is not None and len(stopped.extensions["probe"]) == 3


@pytest.mark.parametrize(
    ("breaks", "message"),
    [(1, "after_layer .*ValueError: after a layer"), (2, "after_draw .*ValueError: after a draw"),
     (3, "on_result.*ValueError: on a result")],
)  # fmt: skip
def test_what_it_raises_ends_its_requests_alone_with_its_name(breaks: int, message: str, checkpoint: Any) -> None:
    with llm_of(checkpoint) as llm:
        broken, fine = llm.generate(PROMPTS[:2], [greedy(breaks=breaks), greedy()])
    assert broken.finish_reason is FinishReason.ERROR and broken.error is not None
    assert "extension 'probe'" in broken.error
    assert re.search(message, broken.error)
    assert fine.token_ids == expected(checkpoint[1], PROMPTS[1], 0.0)[0]


def test_a_request_that_is_aborted_is_forgotten_once(checkpoint: Any) -> None:
    with llm_of(checkpoint) as llm:
        for _ in llm.stream(PROMPTS[0], greedy(strength=1.0)):
            break
        llm.generate(PROMPTS[1], greedy(breaks=4))
    assert len(probing_extension.FORGOTTEN) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"changed": [4]}, r"its layers are \(4,\), and the model's layers are 0 to 3"),
        ({"read": [-1]}, r"its reads_layers are \(-1,\), and the model's layers are 0 to 3"),
    ],
)
def test_layers_that_the_model_does_not_have_are_named(settings: Any, message: str, checkpoint: Any) -> None:
    with llm_of(checkpoint, extensions={"probe": settings}) as llm:
        (output,) = llm.generate(PROMPTS[0], greedy(strength=1.0))
    assert output.error is not None and re.search(message, output.error)


def test_settings_of_the_engine_are_its_own_or_of_all_requests(checkpoint: Any) -> None:
    settings = {"changed": [1], "strength": 0.8}
    with llm_of(checkpoint, extensions={"probe": settings}) as llm:
        output, other = llm.generate([PROMPTS[0]] * 2, [greedy(), greedy(strength=0.0)])
    assert output.token_ids == expected(checkpoint[1], PROMPTS[0], 0.8)[0]
    assert other.token_ids == expected(checkpoint[1], PROMPTS[0], 0.0)[0]
    with pytest.raises(HooklineError, match=r"extensions\.probe\.strenght"):
        llm_of(checkpoint, extensions={"probe": {"strenght": 1.0}})


def test_batch_invariance_refuses_requests_that_change_the_stream(checkpoint: Any) -> None:
    with llm_of(checkpoint, engine=dict(batch_invariant=True)) as llm:
        (output,) = llm.generate(PROMPTS[0], greedy(strength=1.0))
    assert output.error is not None and "engine.batch_invariant is true" in output.error


@pytest.mark.slow
def test_on_a_stage_what_it_raises_ends_the_engine_with_its_name(checkpoint: Any) -> None:
    with (
        pytest.raises((EngineError, HooklineError), match=r"after_layer .*ValueError: after a layer"),
        llm_of(checkpoint, pp=2) as llm,
    ):
        llm.generate(PROMPTS[0], greedy(breaks=1))


def test_an_extension_sees_every_token_the_last_one_included(checkpoint: Any) -> None:
    with llm_of(checkpoint) as llm:
        (long,) = llm.generate([PROMPTS[0]], greedy(strength=0.5))
        ends = replace(greedy(strength=0.5), stop_token_ids=[long.token_ids[2]])
        (stopped,) = llm.generate([PROMPTS[0]], ends)
    assert (long.finish_reason, stopped.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert [state["seen"] for state in probing_extension.FORGOTTEN] == [long.token_ids, stopped.token_ids]


@pytest.mark.slow
def test_clients_of_a_server_get_what_it_tells() -> None:
    body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"extra_args": {"probe": {"strength": 0.5}}}
    paths = {
        "/v1/completions": {"prompt": "def f(x):"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f(x):"}]},
    }
    options = {"device": "cpu", "engine": ENGINE, "extensions": {"probe": {"changed": [0], "read": [0]}}}
    with (
        live_server(lambda: InProcessClient(AsyncLLM(**options), ServeConfig())) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for path, prompt in paths.items():
            (whole,) = http.post(path, json=prompt | body).raise_for_status().json()["choices"]
            stream = http.post(path, json=prompt | body | {"stream": True}).raise_for_status().text
            (plain,) = http.post(path, json=prompt | body | {"extra_args": {}}).raise_for_status().json()["choices"]
            lines = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in line["choices"] if "extensions" in choice]
            told = [one for choice in choices for one in choice["extensions"]["probe"]]
            assert whole["extensions"]["probe"] == told and [one["token"] for one in told] == whole["token_ids"]
            assert len(told) == NUM_TOKENS and len(choices) > 1 and "extensions" not in plain


@pytest.mark.slow
def test_responses_and_messages_have_it_whole_and_at_the_end_of_a_stream() -> None:
    body = {"model": "qwen3_tiny", "temperature": 0, "ignore_eos": True, "extra_args": {"probe": {"strength": 0.5}}}
    paths = {
        "/v1/responses": {"input": "def f(x):", "max_output_tokens": NUM_TOKENS},
        "/v1/messages": {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": NUM_TOKENS},
    }
    options = {"device": "cpu", "engine": ENGINE, "extensions": {"probe": {"changed": [0], "read": [0]}}}
    with (
        live_server(lambda: InProcessClient(AsyncLLM(**options), ServeConfig(names=["qwen3_tiny"]))) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for path, prompt in paths.items():
            whole = http.post(path, json=prompt | body).raise_for_status().json()
            stream = http.post(path, json=prompt | body | {"stream": True}).raise_for_status().text
            plain = http.post(path, json=prompt | body | {"extra_args": {}}).raise_for_status().json()
            events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
            ends = [event.get("response", event).get("extensions") for event in events]
            (told,) = [one for one in ends if one is not None]
            assert whole["extensions"] == told and len(told["probe"]) == NUM_TOKENS
            assert {type(one["token"]) for one in told["probe"]} == {int} and "extensions" not in plain
            refused = http.post(path, json=prompt | body | {"extra_args": {"prob": {}}})
            assert (
                refused.status_code == 400
                and "unknown key 'extra_args.prob'. Did you mean 'extra_args.probe'?" in refused.text
            )
