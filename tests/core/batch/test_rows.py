"""Lines of batch files: what is a request, what is told of one that is none, and what an output answers already."""

import io
import json

import pytest

from hookline.core.batch.rows import MAX_LINE_BYTES, Done, RowError, answer_line, lines_of, parse
from hookline.core.errors import ConfigError

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def read(text):
    return list(lines_of(io.BytesIO(text.encode())))


def test_lines_keep_their_numbers_past_empty_ones():
    assert [(line.number, line.text) for line in read("a\n\n  \nb")] == [(1, b"a\n"), (4, b"b")]


def test_an_input_may_begin_with_a_byte_order_mark():
    marked = read(f"\ufeff{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n")
    assert [parse(line).custom_id for line in marked] == ["a", "a"]
    assert [line.number for line in read(f"\ufeff\n{json.dumps(GOOD)}\n")] == [2]


def test_a_line_that_is_too_long_is_passed_over_and_told(monkeypatch):
    monkeypatch.setattr("hookline.core.batch.rows.MAX_LINE_BYTES", 10)
    first, second = read("x" * 35 + "\nok\n")
    assert first.text is None and second.text == b"ok\n" and second.number == 2
    with pytest.raises(RowError, match="longer than 10 bytes"):
        parse(first)


def test_a_row_is_sent_whole_but_for_streaming():
    [line] = read(json.dumps({**GOOD, "body": {"prompt": "x", "stream": False, "stream_options": None}}))
    row = parse(line)
    assert (row.custom_id, row.path) == ("a", "/v1/completions")
    assert json.loads(row.body) == {"prompt": "x"}  # so that an endpoint without streams has nothing to ignore


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": None}, "custom_id=None must be a text"),
        ({"custom_id": ""}, "custom_id='' must be a text"),
        ({"method": "GET"}, "method='GET' must be POST"),
        (
            {"url": "/load"},
            "url='/load' is not one of /v1/chat/completions, /v1/completions, /v1/responses",
        ),
        ({"body": "x"}, "body='x' must be an object"),
        ({"body": {"stream": True}}, "a batch gives whole answers"),
    ],
)
def test_what_is_no_request_is_told(change, message):
    [line] = read(json.dumps({**GOOD, **change}))
    with pytest.raises(RowError, match=message):
        parse(line)


@pytest.mark.parametrize("text", ["nonsense", "[1]", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")])
def test_a_line_that_is_no_object_is_told(text):
    with pytest.raises(RowError):
        parse(read(text)[0])


def test_an_output_tells_what_is_done_and_loses_half_a_line(tmp_path):
    lines, path = read("a\nb\nc\n"), tmp_path / "out"
    failed = answer_line(lines[2], '"status_code": 200', None, RowError("x", "y"))
    path.write_bytes(answer_line(lines[0], '"response": null', {"status_code": 200, "body": {}}) + failed + b'{"id": ')
    with path.open("r+b") as file:
        done = Done.read(file, path)
    assert [done.holds(line) for line in lines] == [True, False, True] and (done.count, done.num_failed) == (2, 1)
    assert path.read_bytes().endswith(b"}\n")


def test_an_output_of_another_input_is_refused(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(answer_line(read("a\n")[0], "a", {}))
    with path.open("r+b") as file:
        done = Done.read(file, path)
    with pytest.raises(ConfigError, match="line 1 of the input is not the one that the output answers"):
        done.holds(read("b\n")[0])


def test_a_file_that_no_batch_wrote_is_left_alone(tmp_path):
    path = tmp_path / "out"
    path.write_text("dear diary\nhalf")
    with path.open("r+b") as file, pytest.raises(ConfigError, match="a line that no batch wrote: b'dear diary"):
        Done.read(file, path)
    assert path.read_text() == "dear diary\nhalf"


def test_a_very_long_answer_counts_as_done(tmp_path):
    [line], path = read("a\n"), tmp_path / "out"
    path.write_bytes(answer_line(line, "a", {"body": "x" * MAX_LINE_BYTES}))
    with path.open("r+b") as file:
        assert Done.read(file, path).holds(line)
