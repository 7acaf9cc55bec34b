"""Recorded requests: the three forms of a prompt, and every mistake named with its line."""

import json

import pytest

from hookline.core.bench.slo import Slo
from hookline.core.bench.trace import read_trace
from hookline.core.bench.workload import WorkloadConfig, draw_load
from hookline.core.errors import ConfigError
from hookline.core.request_options import PLAIN as NOTHING_SAID
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import NEUTRAL

PLAIN = {"arrival_s": 0, "output_tokens": 1, "prompt_tokens": 1}


@pytest.fixture
def trace(tmp_path):
    def write(*lines, **values):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return WorkloadConfig(trace=str(path), **values)

    return write


def test_a_trace_may_begin_with_a_byte_order_mark(trace):
    workload = trace(f"\ufeff{json.dumps(PLAIN)}")
    assert len(read_trace(workload, 100).requests) == 1


def test_prompts_come_as_ids_as_text_and_as_a_number_of_tokens(trace):
    workload = trace(
        {"arrival_s": 1, "output_tokens": 4, "prompt_token_ids": [7, 8]},
        {"arrival_s": 0.5, "output_tokens": 5, "prompt": "text"},
        {"arrival_s": 2, "output_tokens": 6, "prompt_tokens": 30},
        "",
    )
    ids, text, drawn = read_trace(workload, 100, encode=lambda text: [len(text)]).requests
    assert (ids.tokens, ids.arrival_s, ids.params.max_tokens) == ([7, 8], 1.0, 4)
    assert (text.tokens, text.arrival_s) == ([4], 0.5)
    assert len(drawn.tokens) == 30 and max(drawn.tokens) < 100
    assert drawn.params.ignore_eos and drawn.params.temperature == workload.temperature


def test_all_requests_are_sampled_as_the_workload_says_and_as_no_checkpoint_does(trace):
    how = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    for load in (read_trace(trace(PLAIN, **how), 100), draw_load(WorkloadConfig(**how), 100)):
        for request in load.requests:
            assert {name: getattr(request.params, name) for name in NEUTRAL} == NEUTRAL | how
    (plain,) = read_trace(trace(PLAIN), 100).requests
    assert (plain.params.top_k, plain.params.top_p) == (0, 1)


def test_a_line_says_whose_the_request_is_and_what_it_must_keep(trace):
    said = {"priority": 1, "tags": {"tenant": "acme"}, "deadline_s": 2, "cache_salt": "s", "slo": {"ttft_s": 0.5}}
    full, plain = read_trace(trace(PLAIN | said, PLAIN | dict.fromkeys(said)), 100).requests
    assert full.options == RequestOptions(1, {"tenant": "acme"}, 2.0, "s")
    assert (full.slo, plain.slo, plain.options) == (Slo(ttft_s=0.5), Slo(), NOTHING_SAID)


def test_drawn_prompts_differ_from_repetition_to_repetition(trace):
    workload = trace({"arrival_s": 0, "output_tokens": 1, "prompt_tokens": 8})
    assert read_trace(workload, 100).requests == read_trace(workload, 100).requests
    assert read_trace(workload, 100).requests != read_trace(workload, 100, 1).requests


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: not a JSON object"),
        ({"output_tokens": 1, "prompt_tokens": 1}, "line 2: arrival_s=None must be a number of seconds, at least 0"),
        ({"arrival_s": -1, "output_tokens": 1, "prompt_tokens": 1}, "arrival_s=-1 must be"),
        (
            {"arrival_s": 10**400, "output_tokens": 1, "prompt_tokens": 1},
            "arrival_s=<whole number of about 400 digits> must be",
        ),
        ({"arrival_s": True, "output_tokens": 1, "prompt_tokens": 1}, "arrival_s=True must be"),
        ({"arrival_s": 0, "prompt_tokens": 1}, "output_tokens=None must be a whole number of at least 1"),
        ({"arrival_s": 0, "output_tokens": 1}, "no prompt; give one of prompt_token_ids, prompt, prompt_tokens"),
        ({"arrival_s": 0, "output_tokens": 1, "prompt_tokens": 0}, "prompt_tokens=0 must be"),
        (PLAIN | {"prompt_tokens": 2**24 + 1}, "prompt_tokens=16777217 must be at most 16777216"),
        ({"arrival_s": 0, "output_tokens": 1, "prompt_token_ids": [1.5]}, "must be a list of whole numbers"),
        ({"arrival_s": 0, "output_tokens": 1, "prompt": "x"}, "a prompt as text needs a tokenizer"),
        (PLAIN | {"tags": {"Tenant": "a"}}, "tags.Tenant: a tag's key is at most 32 characters"),
        (PLAIN | {"tags": "acme"}, "tags='acme' must be a mapping of keys to texts"),
        (PLAIN | {"deadline_s": -1}, "deadline_s=-1 must be a finite number of seconds above 0"),
        (PLAIN | {"cache_salt": "x" * 257}, "cache_salt has 257 characters; at most 256 are allowed"),
        (PLAIN | {"priority": "high"}, "priority='high' must be a whole number"),
        (PLAIN | {"slo": 3}, "slo=3 must be a mapping of ttft_s, tpot_s or e2e_s to seconds"),
        (PLAIN | {"slo": {"ttft": 3}}, "unknown key 'slo.ttft'. Did you mean 'slo.ttft_s'?"),
        (PLAIN | {"slo": {"ttft_s": -3}}, "slo.ttft_s=-3"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(trace, line, message):
    workload = trace({"arrival_s": 0, "output_tokens": 1, "prompt_tokens": 1}, line)
    with pytest.raises(ConfigError, match=r"trace.jsonl, line 2") as caught:
        read_trace(workload, 100)
    assert message in str(caught.value)


def test_a_trace_may_lie_in_the_home_folder(trace, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trace({"arrival_s": 0, "output_tokens": 1, "prompt_tokens": 3})
    assert len(read_trace(WorkloadConfig(trace="~/trace.jsonl"), 100).requests) == 1


def test_a_missing_or_empty_file_is_named(trace, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.jsonl cannot be read: No such file"):
        read_trace(WorkloadConfig(trace=str(tmp_path / "nowhere.jsonl")), 100)
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(trace(), 100)


@pytest.mark.parametrize(
    "values",
    [{"arrival_s": "1" * 5000}, {"output_tokens": "1" * 5000}, {"prompt": ["1" * 5000]}],
    ids=["arrival_s", "output_tokens", "prompt"],
)
def test_a_line_with_a_long_value_is_told_in_a_short_one(trace, values):
    line = {"arrival_s": 0, "output_tokens": 1, **({} if "prompt" in values else {"prompt_tokens": 1}), **values}
    with pytest.raises(ConfigError, match="must be") as caught:
        read_trace(trace(line), 100)
    assert len(str(caught.value).partition("line 1: ")[2]) < 200
