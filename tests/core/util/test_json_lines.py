import pytest

from hookline.core.util.json_lines import json_object, numbered_lines


def test_a_line_ends_at_a_newline_alone_and_empty_ones_count_but_are_left_out():
    text = '{"a": "x\u2028y"}\n\n  \n{"b": "\x0c"}'
    assert list(numbered_lines(text)) == [(1, '{"a": "x\u2028y"}'), (4, '{"b": "\x0c"}')]
    assert json_object('{"a": "x\u2028y"}') == {"a": "x\u2028y"}


@pytest.mark.parametrize(
    ("line", "error"), [("{", "^not JSON: "), ("[1]", "^not a JSON object but list$"), ("[" * 100_000, "^not JSON: ")]
)
def test_what_is_no_object_is_said(line, error):
    with pytest.raises(ValueError, match=error):
        json_object(line)


def test_json_that_is_nested_too_deeply_is_said():
    with pytest.raises(ValueError, match=r"^not JSON: it is nested too deeply$"):
        json_object('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
