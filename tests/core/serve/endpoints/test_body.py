"""Large bodies: what is counted in them, which are refused, and where they are decoded."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.serve.endpoints import body
from hookline.core.serve.testing import FakeEngineClient
from tests.core.serve.conftest import Ask

TEXTS = st.text(st.sampled_from('\\"[]{},:a\né'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(-3, 300), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20
)
TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')


@settings(max_examples=50)
@given(value=VALUES, piece=st.integers(1, 40), ascii=st.booleans())
def test_what_stands_in_texts_is_left_out_wherever_the_pieces_end(value: Any, piece: int, ascii: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "PIECE", piece)
        assert b"".join(body._outside_texts(data)) == TEXT.sub(b"", data)


def large(inner: str) -> bytes:
    """A body that is large by its prompt."""
    return b'{"max_tokens": 1, "prompt": ' + inner.encode() + b"}"


@pytest.mark.parametrize("unit", ["[],", '{"a":1},', "1,", '"",', '"\\\\",'])
def test_a_body_of_very_many_values_is_refused(ask: Ask, unit: str) -> None:
    data = large(f"[{unit * 2**20}1]")
    response = ask(FakeEngineClient(), "POST", "/v1/completions", content=data)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert "more than 1048576 values" in response.json()["error"]["message"]


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
