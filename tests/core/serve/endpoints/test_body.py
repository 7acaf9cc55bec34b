"""Large bodies: what is counted in them, which are refused, and where they are decoded and made into prompts."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.contracts import ApiError
from hookline.core.serve.endpoints import body
from hookline.core.testing.engine_client import FakeEngineClient
from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.token_spelling import TokenSpelling
from tests.core.serve.conftest import Ask
from tests.fuzzing import examples

TEXTS = st.text(st.sampled_from('\\"[]{},:a\né'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(-3, 300), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20
)
LONG_SCHEMA = {"type": "object", "description": "x" * 10_000}
TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')


@settings(max_examples=examples(50))
@given(value=VALUES, piece=st.integers(1, 40), ascii=st.booleans())
def test_what_stands_in_texts_is_left_out_wherever_the_pieces_end(value: Any, piece: int, ascii: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "PIECE", piece)
        assert b"".join(body._outside_texts(data)) == TEXT.sub(b"", data)


def large(inner: str) -> bytes:
    """A body that is large by its prompt."""
    return b'{"max_tokens": 1, "prompt": ' + inner.encode() + b"}"


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["[],", '{"a":1},', "1,", '"",', '"\\\\",'])
def test_a_body_of_very_many_values_is_refused(ask: Ask, unit: str) -> None:
    data = large(f"[{unit * 2**20}1]")
    response = ask(FakeEngineClient(), "POST", "/v1/completions", content=data)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert "more than 1048576 values" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "message", "param"),
    [
        (b"", "the body is empty; send a JSON object", None),
        (b" \r\n", "the body is empty; send a JSON object", None),
        (b'{"prompt": "hi", "temperature": 1e400}', "temperature: Number out of range", "temperature"),
        (b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", "seed: Integer value out of range", "seed"),
        (b'{"prompt": "\xff"}', "prompt: it holds bytes that are not UTF-8", "prompt"),
        *(
            (
                b'{"prompt": "\\\\\\ud83d\\ude00 ' + half + b'", "n": 1}',
                f"{told} (byte 27) is half a surrogate pair",
                None,
            )
            for half, told in ((rb"\ud83d", r"\ud83d"), (rb"\uDE00.", r"\uDE00"), (rb"\ud83d\n", r"\ud83d"))
        ),
        (b'{"prompt": "\\ud83d', "Input data was truncated", None),
        (b'{"prompt": "hi",}', "JSON is malformed: trailing comma in object (byte 16)", None),
    ],
)
def test_why_a_body_cannot_be_read_is_told_with_its_place(
    ask: Ask, data: bytes, message: str, param: str | None
) -> None:
    response = ask(FakeEngineClient(), "POST", "/v1/completions", content=data)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error
    assert error["message"].removeprefix("the body is not valid JSON: ").startswith(message), error


@pytest.mark.parametrize("is_text", [False, True])
def test_a_large_body_s_numbers_have_no_more_digits_than_any_float(ask: Ask, is_text: bool) -> None:
    numbers = "9" * 4300 + "," + "1," * 2**18
    data = large(json.dumps(numbers) if is_text else f"[{numbers}1]")
    message = ask(FakeEngineClient(), "POST", "/v1/completions", content=data).json()["error"]["message"]
    assert message == "the body holds a number of more than 400 digits" or is_text


def test_a_large_text_may_hold_what_would_be_too_many_values_outside_of_it(ask: Ask) -> None:
    text = '[{"a": "\\\\", "b": [1, 2]}, ' * 2**16
    response = ask(FakeEngineClient(), "POST", "/v1/completions", content=large(json.dumps(text)))
    assert "maximum context length" in response.json()["error"]["message"]


def test_a_large_body_is_decoded_in_a_thread_and_a_small_one_is_not(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    decoded = body._decoded
    monkeypatch.setattr(body, "_decoded", lambda *given: threads.append(threading.current_thread()) or decoded(*given))
    for num_ids in (10, 200_000):
        response = ask(FakeEngineClient(), "POST", "/v1/completions", content=large(f"[{'123,' * num_ids}1]"))
        assert response.status_code == (200 if num_ids == 10 else 400)
    assert threads[0] is threading.main_thread() and threads[1].name.startswith("hookline-bodies")


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": LONG_SCHEMA}}]},
        ),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": LONG_SCHEMA}]}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": LONG_SCHEMA}]}),
        ("/v1/messages/count_tokens", {"tools": [{"name": "f", "input_schema": LONG_SCHEMA}]}),
    ],
)
def test_a_chat_with_long_tools_is_written_in_a_thread_and_a_short_one_is_not(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    threads = []
    render = Codec.render_chat
    monkeypatch.setattr(
        Codec,
        "render_chat",
        lambda *given, **options: threads.append(threading.current_thread()) or render(*given, **options),
    )
    choice = {"tool_choice": {"type": "none"} if "messages" in path else "none"}
    messages = [{"role": "user", "content": "x"}]
    for fields in ({}, {**more, **choice}):
        request = {"messages": messages, "input": messages, "max_tokens": 2, **fields}
        assert ask(FakeEngineClient(), "POST", path, json=request).status_code == 200
    assert threads[0] is threading.main_thread() and threads[1] is not threading.main_thread()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_too_many_biases_are_refused_by_their_number_before_one_is_decoded(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(body, "_decoded", lambda *given: pytest.fail("decoded"))
    fields = {"prompt": "x", "messages": [], "logit_bias": dict.fromkeys(map(str, range(90_000)), 0.5)}
    response = ask(FakeEngineClient(), "POST", path, json=fields)
    message = "logit_bias has 90000 tokens; at most 16384 are allowed"
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": "logit_bias",
        "code": None,
    }


@pytest.mark.parametrize("bias", ["7", '{"7": 1}', '{"7": 1,}', '"{,"', "[1, 2]"])
def test_a_large_body_with_another_bias_is_answered_as_a_small_one_is(ask: Ask, bias: str) -> None:
    small, large = f'{{"logit_bias": {bias}, "prompt": "x", "user": "', "x" * 600_000
    answers = [ask(FakeEngineClient(), "POST", "/v1/completions", content=small + end) for end in ('"}', large + '"}')]
    said = [(one.status_code, one.json().get("error")) for one in answers]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/tokenize", {"prompt": "x" * 10_000, "return_token_strs": True}), ("/detokenize", {"tokens": [65] * 10_000})],
)
def test_many_tokens_are_looked_at_in_a_thread(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    class WatchedFacts:
        """The model's facts, which note who asks for the size of the vocabulary."""

        def __getattr__(self, name: str) -> Any:
            if name == "vocab_size":
                threads.add(threading.current_thread())
            return getattr(facts, name)

    threads: set[threading.Thread] = set()
    spelt = TokenSpelling.text
    monkeypatch.setattr(TokenSpelling, "text", lambda *given: threads.add(threading.current_thread()) or spelt(*given))
    client = FakeEngineClient()
    facts = client.facts
    client.facts = WatchedFacts()  # type: ignore[assignment]
    assert ask(client, "POST", path, json=fields).status_code == 200
    assert threads and threading.main_thread() not in threads


def test_names_of_ignored_fields_cannot_write_a_header_of_their_own() -> None:
    found = body.ignored_header(["fine", "a\r\nX-Other: 1", "\u00e9", "x" * 65, *(["more"] * 50)])
    assert found[body.IGNORED_HEADER].split(", ") == ["fine", "?", "?", "?", *(["more"] * 16)]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_may_begin_with_a_byte_order_mark(ask: Ask, path: str) -> None:
    body = json.dumps({"prompt": "x"}).encode("utf-8-sig")
    assert ask(FakeEngineClient(), "POST", path, content=body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"logit_bias": {"3": 1, "5": "x", "7": "y"}}, "logit_bias[5]"),
        ({"logit_bias": {**{str(number): 1 for number in range(99)}, "last": None}}, "logit_bias[last]"),
        ({"tags": {"tenant": "a", "team": 5}, "n": "x"}, "tags[team]"),
    ],
)
def test_a_value_of_a_mapping_is_named_by_its_key(ask: Ask, fields: dict[str, Any], place: str) -> None:
    error = ask(FakeEngineClient(), "POST", "/v1/completions", json={"prompt": "x", **fields}).json()["error"]
    assert error["message"].startswith(f"{place}: Expected `") and error["param"] == place


class Inner(msgspec.Struct):
    size: int


class Outer(msgspec.Struct):
    lists: list[dict[str, dict[str, int]]] = []
    inner: dict[str, Inner] = {}


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"lists": [{"x": {"a": "b"}}]}, "lists[0][x][a]"),
        ({"lists": [{}, {"p": {}, "q": {"r": 1, "s": "t"}, "u": 5}]}, "lists[1][q][s]"),
        ({"inner": {"p": {"size": 1}, "q": {"size": "x"}}}, "inner[q].size"),
        ({"inner": {"p": {"size": 1}, "[...]": {}}}, "inner[[...]].size"),
    ],
)
def test_keys_of_mappings_within_others_are_named_too(values: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as refused:
        body.checked(values, Outer)
    assert refused.value.param == place
