"""What parsers are made of, against plain definitions over any text in any pieces."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.contracts import Arguments, Reasoning, Text, ToolCall
from hookline.core.parsing import JsonEnd, merged, num_held_back, split_before
from tests.fuzzing import examples

TAG = "<think>"
few = settings(max_examples=examples(60), deadline=None)


@few
@given(st.text("<think>a ", max_size=14))
def test_what_is_held_back_is_the_longest_end_that_begins_the_tag(text: str) -> None:
    ends = [count for count in range(1, len(TAG)) if text.endswith(TAG[:count])]
    assert num_held_back(text, TAG) == max(ends, default=0)


def test_white_space_before_a_tag_belongs_to_it() -> None:
    assert split_before("Hello \n<thi", TAG) == ("Hello", " \n<thi")
    assert split_before("Hello ", TAG) == ("Hello", " ")
    assert split_before("Hello <b", TAG) == ("Hello <b", "")


VALUES = st.recursive(
    st.none() | st.integers() | st.text('{}[]"\\a', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('{"\\', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@few
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.text('}]"x', max_size=5), st.data())
def test_the_end_of_an_object_is_found_wherever_it_is_cut(
    value: dict[str, object], rest: str, data: st.DataObject
) -> None:
    text = json.dumps(value)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    pieces[-1] += rest
    end, seen = JsonEnd(), 0
    for piece in pieces:
        found = end.push(piece)
        if found is not None:
            assert text == "".join(pieces)[: seen + found]
            return
        seen += len(piece)
    raise AssertionError("the object has no end")


def test_neighbours_of_a_kind_are_joined_and_calls_stay_apart() -> None:
    parts = [Text("a"), Text("b"), Reasoning("c"), ToolCall("f"), Arguments("{"), Arguments("}"), ToolCall("f")]
    joined = [Text("ab"), Reasoning("c"), ToolCall("f"), Arguments("{}"), ToolCall("f")]
    assert merged(parts) == joined
