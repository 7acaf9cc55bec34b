"""/v1/embeddings, /score and /rerank around a fake engine: their forms, their refusals, and how vectors travel."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.pooling_params import EMBED, PoolingParams
from hookline.core.serve.processes.messages import StepNews, decode_from_engine, encode, end_of, output_of
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import NUM_DIMENSIONS, FakeEngineClient, tiny_model
from hookline.core.tokenizer.codec import Codec

Ask = Callable[..., httpx.Response]


def embedded(ask: Ask, client: FakeEngineClient | None = None, **body: Any) -> Any:
    response = ask(client or FakeEngineClient(), "POST", "/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(ask: Ask, path: str, client: FakeEngineClient | None = None, **body: Any) -> tuple[int, str | None, str]:
    response = ask(client or FakeEngineClient(), "POST", path, json=body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def test_inputs_of_all_four_forms_come_back_in_their_order(ask: Ask) -> None:
    ids = FakeEngineClient().facts.codec.encode("import os")
    texts = embedded(ask, input=["def", "import os"])
    assert [one["index"] for one in texts["data"]] == [0, 1] and texts["object"] == "list" and texts["model"] == "fake"
    (alone,) = embedded(ask, input="import os")["data"]
    (of_ids,) = embedded(ask, input=ids)["data"]
    several = embedded(ask, input=[ids, "def"])
    assert alone["embedding"] == of_ids["embedding"] == texts["data"][1]["embedding"] == several["data"][0]["embedding"]
    assert several["data"][1]["embedding"] == texts["data"][0]["embedding"] and alone["object"] == "embedding"
    assert several["usage"]["prompt_tokens"] == several["usage"]["total_tokens"] == texts["usage"]["prompt_tokens"]


def test_base64_is_the_same_numbers_as_little_endian_float32(ask: Ask) -> None:
    (numbers,) = embedded(ask, input="x")["data"]
    (coded,) = embedded(ask, input="x", encoding_format="base64")["data"]
    found = np.frombuffer(base64.b64decode(coded["embedding"]), dtype="<f4")
    assert found.tolist() == numbers["embedding"] and len(found) == NUM_DIMENSIONS


def test_a_request_s_wishes_and_options_reach_the_engine(ask: Ask) -> None:
    client = FakeEngineClient()
    embedded(ask, client, input="x", dimensions=4, normalize=False, pooler="mean", priority=3, tags={"tenant": "a"})
    options = client.asked[0].options
    assert options["pooling"] == PoolingParams("mean", normalize=False, dimensions=4)
    assert (options["priority"], options["tags"]) == (3, {"tenant": "a"})


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is missing or empty"),
        ({"input": []}, "input", "input is missing or empty"),
        ({"input": [[]]}, "input.0", "neither a text nor a list of token ids"),
        ({"input": ["x", 1]}, "input.1", "neither a text nor a list of token ids"),
        ({"input": 7}, "input", "Expected"),
        ({"input": "x", "dimensions": 0}, "dimensions", "dimensions=0 must be a whole number from 1"),
        ({"input": "x", "dimensions": -4}, "dimensions", "dimensions=-4"),
        ({"input": "x", "dimensions": 2**40}, "dimensions", "must be a whole number from 1"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "must be float or base64"),
        ({"input": "x", "pooler": ""}, "pooler", "must be the name of a pooler"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_field(ask: Ask, body: Any, param: str, message: str) -> None:
    status, found, text = refusal(ask, "/v1/embeddings", **body)
    assert (status, found) == (400, param) and message in text


def test_a_model_that_cannot_embed_is_404_with_the_reason(ask: Ask) -> None:
    client = FakeEngineClient(facts=replace(tiny_model(), no_embeddings="modules.json does not say how to pool"))
    status, param, text = refusal(ask, "/v1/embeddings", client, input="x")
    assert (status, param, text) == (404, "model", "modules.json does not say how to pool")
    assert refusal(ask, "/v1/embeddings", input="x", model="other")[0] == 404


def test_scores_of_pairs_come_in_their_order(ask: Ask) -> None:
    for path in ("/score", "/v1/score"):
        found = ask(FakeEngineClient(), "POST", path, json={"text_1": "q", "text_2": ["a", "b"]}).json()
        assert [(one["index"], one["object"]) for one in found["data"]] == [(0, "score"), (1, "score")]
    each = ask(FakeEngineClient(), "POST", "/score", json={"text_1": ["q", "q"], "text_2": ["a", "b"]}).json()
    assert each["data"] == found["data"] and found["data"][0] != found["data"][1]
    assert found["usage"]["prompt_tokens"] > 20  # the template's


def test_documents_are_ranked_the_best_first(ask: Ask) -> None:
    documents = ["a", {"text": "b"}, "c"]
    found = ask(FakeEngineClient(), "POST", "/v1/rerank", json={"query": "q", "documents": documents}).json()
    scores = ask(FakeEngineClient(), "POST", "/score", json={"text_1": "q", "text_2": ["a", "b", "c"]}).json()
    by_index = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert [by_index[index] for index in range(3)] == [one["score"] for one in scores["data"]]
    assert sorted(by_index.values(), reverse=True) == [one["relevance_score"] for one in found["results"]]
    assert all(one["document"]["text"] == "abc"[one["index"]] for one in found["results"])
    top = {"query": "q", "documents": documents, "top_n": 1, "return_documents": False}
    best = {name: value for name, value in found["results"][0].items() if name != "document"}
    assert ask(FakeEngineClient(), "POST", "/rerank", json=top).json()["results"] == [best]


def test_an_embedding_model_scores_by_the_cosine(ask: Ask) -> None:
    client = FakeEngineClient(facts=replace(tiny_model(), scored_by=EMBED))
    found = ask(client, "POST", "/score", json={"text_1": "import os", "text_2": ["import os", "def"]}).json()["data"]
    assert len(client.asked) == 2  # each text once
    vectors = [np.array(one["embedding"]) for one in embedded(ask, input=["import os", "def"])["data"]]
    assert [one["score"] for one in found] == pytest.approx([1.0, vectors[0] @ vectors[1]], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "q", "text_2": []}, "text_2"),
        ("/score", {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "q", "text_2": [3]}, "text_2[0]"),
        ("/rerank", {"query": "q"}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a", {"image": 1}]}, "documents.1"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_its_field(ask: Ask, path: str, body: Any, param: str) -> None:
    status, found, _ = refusal(ask, path, **body)
    assert status == 400 and (found or "").startswith(param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["x"] * 9}, "input"),
        ("/score", {"text_1": "x", "text_2": ["x"] * 9}, "text_2"),
        ("/rerank", {"query": "x", "documents": ["x"] * 9}, "documents"),
        ("/v1/completions", {"prompt": ["x"] * 9}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 3, "n": 3}, "prompt"),
        ("/v1/completions", {"prompt": "x", "n": 9}, "n"),
        # What is wrong with one of them is not come to.
        ("/v1/embeddings", {"input": ["x"] * 8 + [{}]}, "input"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x"] * 9}, "text_2"),
        ("/rerank", {"query": "x", "documents": [{}] * 9}, "documents"),
        ("/v1/completions", {"prompt": ["x"] * 8 + [{}]}, "prompt"),
    ],
)
def test_too_many_prompts_are_refused_before_one_is_looked_at(
    ask: Ask, path: str, body: Any, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, encoded = FakeEngineClient(), []
    monkeypatch.setattr(Codec, "_tokenize", lambda *given, **options: encoded.append(given) or [1])
    response = ask(client, "POST", path, ServeConfig(max_requests=8), json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    assert error["message"].startswith("9 answers are asked for (")
    assert error["message"].endswith("); serve.max_requests=8 are the most at once")
    assert not encoded


def test_a_query_too_long_for_any_document_is_tokenized_once(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    client, encoded = FakeEngineClient(facts=replace(tiny_model(), max_model_len=64)), []
    encode = Codec.encode_plain
    monkeypatch.setattr(Codec, "encode_plain", lambda codec, text: encoded.append(text) or encode(codec, text))
    body = {"query": "hello " * 400, "documents": ["x"] * 100}
    response = ask(client, "POST", "/rerank", json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded" and len(encoded) == 1


def test_a_vector_travels_between_the_processes_as_its_bytes() -> None:
    vector = np.array([1.5, -0.1, 3e-39], dtype=np.float32)
    output = RequestOutput(7, None, [1, 2], [], FinishReason.STOP, vector=vector)
    sent = decode_from_engine(encode(StepNews(b"", b"", {}, {}, [end_of(7, output)])))
    assert isinstance(sent, StepNews)
    found = output_of(sent.ends[0], None, [1, 2], [], 0)
    assert found.vector is not None and found.vector.tobytes() == vector.tobytes()
