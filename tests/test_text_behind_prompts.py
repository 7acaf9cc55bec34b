"""Prompt and text are one text with tokenizers as Llama 2's: from the engine, from streams, and over HTTP."""

import asyncio
import json
from dataclasses import replace

import pytest

pytest.importorskip("starlette", reason="needs the extra: pip install hookline[serve]")

import httpx

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.outputs import FinishReason
from hookline.core.serve.http.api_keys import ApiKeys
from hookline.core.serve.http.app import make_app
from hookline.core.serve.processes.remote_stream import RemoteCompletion, RemoteStream
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient, tiny_model
from hookline.core.tokenizer.codec import Codec
from tests.hf_models import make_qwen3
from tests.text_behind import llama, save

PROMPT = "The capital of France is"
SIZES = dict(num_blocks=64, block_size=8, max_num_seqs=4, max_model_len=128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = llama()
    make_qwen3(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=2, bos_token_id=1)
    return save(tokenizer, folder)


@pytest.fixture(scope="module")
def codec(checkpoint):
    return Codec(checkpoint)


def options(checkpoint):
    return {"model": {"name": "qwen3", "checkpoint": str(checkpoint)}, "device": "cpu", "engine": SIZES}


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(**options(checkpoint)) as llm:
        yield llm


def paris(codec, **rest):
    """Parameters by which a completion is "Paris" behind a space, again and again."""
    return SamplingParams(allowed_token_ids=[codec.tokenizer.get_vocab()["▁Paris"]], max_tokens=2, **rest)


@pytest.mark.parametrize("skips", [True, False])
def test_a_completion_begins_with_the_space_behind_its_prompt(llm, codec, skips):
    params = paris(codec, skip_special_tokens=skips)
    [output] = llm.generate(PROMPT, params)
    deltas = list(llm.stream(PROMPT, params))
    assert output.text == deltas[-1].output.text == "".join(delta.text for delta in deltas) == " Paris Paris"


def test_a_stop_string_with_a_space_stops_the_first_word(llm, codec):
    [output] = llm.generate(PROMPT, paris(codec, stop=" Paris"))
    assert (output.text, output.stop_reason, len(output.token_ids)) == ("", " Paris", 1)


def test_the_answer_to_a_chat_begins_without_a_space(llm, codec):
    [output] = llm.generate([[{"role": "user", "content": PROMPT}]], paris(codec))
    assert output.text == "Paris Paris"


@pytest.mark.slow
def test_an_async_stream_begins_with_the_space(checkpoint, codec):
    async def texts():
        async with AsyncLLM(**options(checkpoint)) as llm:
            return [delta.text async for delta in llm.stream(PROMPT, paris(codec))]

    assert "".join(asyncio.run(texts())) == " Paris Paris"


def test_a_front_end_of_its_own_reads_the_same_text(codec):
    async def texts():
        stream = RemoteStream(lambda left: None, asyncio.get_running_loop(), 0, paris(codec), PROMPT, {})
        completion = RemoteCompletion(stream, 0)
        stream.prepare([completion], codec.encode(PROMPT), paris(codec), replace(tiny_model(), codec=codec))
        for _ in range(2):
            completion.see(codec.tokenizer.get_vocab()["▁Paris"], None)
        return completion.take().text

    assert asyncio.run(texts()) == " Paris Paris"


def served(codec, reply):
    """A server whose engine answers with these tokens."""
    vocabulary = codec.tokenizer.get_vocab()
    facts = replace(tiny_model(), codec=codec, eos_token_ids=(2,), vocab_size=len(vocabulary))
    return FakeEngineClient(reply=[vocabulary[one] for one in reply], facts=facts)


def ask(client, path, **body):
    async def send():
        app = make_app(client, ServeConfig(), ApiKeys(())).app
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as http:
            return await http.post(path, json=body)

    return asyncio.run(send())


def choices(client, path, **body):
    """A choice as an answer has it, and the choices of all frames of a stream."""
    whole = ask(client, path, **body).json()["choices"][0]
    lines = ask(client, path, **body, stream=True).text.split("\n\n")
    frames = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return whole, [frame["choices"][0] for frame in frames if frame["choices"]]


@pytest.mark.parametrize("prompt", [PROMPT, f" {PROMPT}", "é(", "a:\n"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_tokens_and_offsets_are_of_the_text_that_is_shown(codec, prompt, as_ids):
    given = codec.encode(prompt)[1:] if as_ids else prompt
    client = served(codec, ["▁Paris", "▁is"])
    for echo in (True, False):
        whole, frames = choices(client, "/v1/completions", prompt=given, echo=echo, logprobs=1, max_tokens=2)
        assert whole["text"] == "".join(one["text"] for one in frames) == (prompt if echo else "") + " Paris is"
        found = whole["logprobs"]
        shown = ["" if token == "<s>" else token for token in found["tokens"]]
        if "é" not in prompt:
            assert "".join(shown) == whole["text"]
            text = whole["text"] if echo else prompt + whole["text"]
            assert all(text.startswith(*at) for at in zip(shown, found["text_offset"], strict=True))
        assert shown[-2:] == [" Paris", " is"]
        assert f"{prompt} Paris is".startswith(" is", found["text_offset"][-1])
        assert [token for one in frames for token in one["logprobs"]["tokens"]] == found["tokens"]
        assert [offset for one in frames for offset in one["logprobs"]["text_offset"]] == found["text_offset"]
    tokens = codec.encode(prompt)[1:] + client.reply
    assert ask(client, "/detokenize", tokens=tokens).json()["prompt"] == prompt + " Paris is"


def test_the_tokens_of_a_chat_s_answer_are_its_text(codec):
    client = served(codec, ["▁Paris", "▁is"])
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    whole, frames = choices(client, "/v1/chat/completions", **asked)
    assert whole["message"]["content"] == "Paris is"
    assert [one["token"] for one in whole["logprobs"]["content"]] == ["Paris", " is"]
    assert [one["token"] for frame in frames if frame.get("logprobs") for one in frame["logprobs"]["content"]] == [
        "Paris",
        " is",
    ]
    answer = ask(client, "/v1/responses", input=PROMPT, include=["message.output_text.logprobs"], top_logprobs=1).json()
    (part,) = answer["output"][-1]["content"]
    assert part["text"].startswith("Paris is") and part["logprobs"][0]["token"] == "Paris"


def test_an_answer_that_goes_on_with_the_last_message_keeps_its_space(codec):
    client = served(codec, ["▁Paris"])
    messages = [{"role": "user", "content": "is"}, {"role": "assistant", "content": PROMPT}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
    whole, frames = choices(client, "/v1/chat/completions", **asked)
    assert whole["message"]["content"] == " Paris"
    assert "".join(frame["delta"].get("content") or "" for frame in frames) == " Paris"


def test_a_text_that_brings_the_first_token_itself_is_told_once(checkpoint, caplog):
    codec = Codec(checkpoint)
    for _ in range(2):
        assert codec.encode(f"<s>{PROMPT}")[:2] == [1, 1]
    assert codec.encode_text(f"<s>{PROMPT}", add_special_tokens=False)[:2] != [1, 1]
    [record] = caplog.records
    assert record.getMessage().startswith("a prompt begins with <s> twice: its text has one, and the tokenizer puts")


def test_an_engine_stops_at_the_token_that_its_tokenizer_names_and_says_so(tmp_path, caplog):
    tokenizer = llama()
    make_qwen3(tmp_path, vocab_size=tokenizer.get_vocab_size(), eos_token_id=None)
    save(tokenizer, tmp_path)
    for name in ("config.json", "generation_config.json"):
        told = json.loads((tmp_path / name).read_text())
        assert told.get("eos_token_id") is None
    with caplog.at_level("WARNING", "hookline"), LLM(**options(tmp_path)) as llm:
        [output] = llm.generate(PROMPT, SamplingParams(allowed_token_ids=[2], max_tokens=5))
    assert (output.finish_reason, output.token_ids, output.text) == (FinishReason.STOP, [2], "")
    assert [one.getMessage() for one in caplog.records if "eos_token" in one.getMessage()] == [
        "the tokenizer's eos_token, </s> (id 2), ends completions, too, though neither config.json nor "
        "generation_config.json names it; model.hf_overrides.eos_token_id says what does"
    ]


def test_without_a_number_of_tokens_there_are_as_many_as_there_is_room_for(llm, codec):
    params = replace(paris(codec), max_tokens=None, min_tokens=100)
    [output] = llm.generate(PROMPT, params)
    assert len(output.prompt_token_ids) + len(output.token_ids) == SIZES["max_model_len"]
    assert output.finish_reason is FinishReason.LENGTH
