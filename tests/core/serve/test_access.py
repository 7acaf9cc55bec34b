"""What the access log says of the tokens of one request."""

from __future__ import annotations

from hookline.core.outputs import Delta, FinishReason, RequestOutput
from hookline.core.serve.access import Access


def test_a_request_that_has_not_ended_has_its_tokens_so_far_and_no_length_of_its_prompt() -> None:
    """It is so of a client that left, whose line said that there were none."""
    access = Access()
    assert access.fields() == {}
    for index in (0, 1):
        access.add(Delta(0, 0, index, "ab", [1, 2]))
    fields = access.fields()
    assert fields.pop("first_token_s") >= 0 and fields == {"output": 4}


def test_tokens_are_counted_as_they_come_and_the_prompt_of_several_completions_once() -> None:
    access = Access()
    for index in (0, 1):
        access.add(Delta(0, 0, index, "ab", [1, 2]))
        output = RequestOutput(0, None, [5, 6, 7], [1, 2, 3], FinishReason.LENGTH, index=index, num_cached_tokens=1)
        access.add(Delta(0, 0, index, "c", [3], output))
    assert {name: access.fields()[name] for name in ("prompt", "cached", "output")} == {
        "prompt": 3,
        "cached": 1,
        "output": 6,
    }
