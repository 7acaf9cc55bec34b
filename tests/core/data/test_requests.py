"""Rows of tables as requests."""

import json

import pytest

from hookline.core.data.requests import RowReader
from hookline.core.errors import RequestError

CHAT = [{"role": "user", "content": "hi", "name": None}]


@pytest.mark.parametrize(
    ("task", "row", "prompt"),
    [
        ("completion", {"prompt": "a", "messages": None}, "a"),
        ("completion", {"prompt_token_ids": [1, 2]}, [1, 2]),
        ("chat", {"messages": CHAT}, [{"role": "user", "content": "hi"}]),
        ("chat", {"messages": json.dumps(CHAT)}, [{"role": "user", "content": "hi"}]),
        ("embeddings", {"prompt": "a"}, "a"),
    ],
)
def test_a_rows_prompt_is_in_the_columns_of_its_task(task, row, prompt):
    assert RowReader(task).request_of(row).prompt == prompt


def test_a_rows_own_parameters_go_before_those_of_all():
    reader = RowReader(sampling={"max_tokens": 3, "temperature": 0})
    assert reader.request_of({"prompt": "a"}).params.max_tokens == 3
    for own in ({"max_tokens": 5, "top_p": None}, '{"max_tokens": 5}'):
        params = reader.request_of({"prompt": "a", "sampling": own}).params
        assert (params.max_tokens, params.temperature) == (5, 0)


def test_a_form_is_that_of_the_row_or_of_all():
    schema = {"type": "integer"}
    for row in ({"json_schema": json.dumps(schema)}, {"structured_outputs": {"json": schema, "regex": None}}):
        [prompt] = [{"prompt": "a", **row}]
        assert json.loads(json.dumps(RowReader("structured").request_of(prompt).params.structured_outputs.json)) in (
            schema,
            json.dumps(schema),
        )
    of_all = RowReader("structured", {"structured_outputs": {"regex": "a+"}})
    assert of_all.request_of({"messages": CHAT}).params.structured_outputs.regex == "a+"


def test_a_row_without_a_seed_is_answered_alike_when_it_is_tried_again():
    reader = RowReader(sampling={"temperature": 1.0}, seed=3)
    first, again, other = (reader.request_of({"prompt": "a"}, number).params.seed for number in (0, 0, 1))
    assert first == again != other
    assert RowReader(sampling={"seed": 7}).request_of({"prompt": "a"}).params.seed == 7


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("completion", {}, "a row needs one of prompt, prompt_token_ids; it has none"),
        ("completion", {"prompt": "a", "prompt_token_ids": [1]}, "it has prompt and prompt_token_ids"),
        ("completion", {"prompt": 3}, "prompt=3 is not a text"),
        ("completion", {"prompt_token_ids": "abc"}, "is not a list of token ids"),
        ("chat", {"messages": "[nonsense"}, "is not JSON"),
        ("chat", {"messages": [{"role": None, "content": "a"}]}, "must be a list of mappings with role and content"),
        (
            "chat",
            {"messages": '[{"role": ' + "9" * 5000 + "}]"},
            "is not JSON: a number in it has more than 4300 digits",
        ),
        ("chat", {"messages": []}, "must be a list of mappings with role and content"),
        ("completion", {"prompt": "a", "sampling": {"max_tokens": 0}}, "sampling.max_tokens=0 must be at least 1"),
        ("completion", {"prompt": "a", "sampling": "[1]"}, "sampling='[1]' must be a mapping"),
        ("completion", {"prompt": "a", "sampling": {"n": 2}}, "sampling.n=2 must be 1"),
        ("structured", {"prompt": "a"}, "the row does not say what form its answer has"),
    ],
)
def test_a_row_that_is_no_request_says_why(task, row, message):
    with pytest.raises(RequestError) as raised:
        RowReader(task).request_of(row)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_task_that_is_not_there_is_refused():
    with pytest.raises(RequestError, match="task='poetry' is not one of completion, chat, structured, embeddings"):
        RowReader("poetry")
