"""A message's content around tool calls: words stay apart, in a whole answer as in a stream."""

from __future__ import annotations

import json

import pytest

from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient
from tests.core.serve.conftest import Ask

SETTINGS = ServeConfig(tool_parser="hermes")
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("reply", "content"),
    [
        (f"Hi {CALL} bye", "Hi\nbye"),
        (f"Hi{CALL}{CALL}bye", "Hi\nbye"),
        (f"Hi\n{CALL}\n", "Hi"),
        (f"{CALL} bye", "bye"),
        (f"{CALL}", ""),
        ("Hi <tool_call>no JSON</tool_call> bye", "Hi <tool_call>no JSON</tool_call> bye"),
    ],
)
def test_texts_around_a_call_are_kept_apart(ask: Ask, reply: str, content: str, one_by_one: bool) -> None:
    client = FakeEngineClient(reply, one_by_one=one_by_one)
    whole = ask(client, "POST", "/v1/chat/completions", SETTINGS, json=BODY).json()
    assert (whole["choices"][0]["message"]["content"] or "") == content
    text = ask(client, "POST", "/v1/chat/completions", SETTINGS, json={**BODY, "stream": True}).text
    chunks = [json.loads(frame[6:]) for frame in text.split("\n\n") if frame and "[DONE]" not in frame]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == content
