"""Loads of several classes: drawn by their shares, carried through an engine, and figures for each tag."""

import json
from dataclasses import replace

import pytest
import yaml

from hookline.core.bench.driver import drive
from hookline.core.bench.files import read_recording, write_recording
from hookline.core.bench.latencies import STATISTICS
from hookline.core.bench.metrics import check_objective, summarise
from hookline.core.bench.slo import Slo
from hookline.core.bench.tag_metrics import TAG_DISTRIBUTIONS, TAG_NUMBERS, tag_lines
from hookline.core.bench.trace import read_trace
from hookline.core.bench.workload import Load, WorkloadConfig, draw_load
from hookline.core.config.schema import build
from hookline.core.errors import ConfigError
from hookline.core.request_options import RequestOptions
from hookline.core.sweep.results import objective_value
from tests.core.bench.test_driver import ManualClock, engine_on, request
from tests.core.bench.test_workload import CONF

CHAT = {"share": 4, "tags": {"class": "chat"}, "prompt_len": [2, 4], "output_len": [1, 3], "slo": {"ttft_s": 1.5}}
BATCH = {"tags": {"class": "batch"}, "priority": 1, "deadline_s": 9, "cache_salt": "b", "prompt_len": [20, 30]}


def workload(*classes, **values):
    sizes = {"num_prompts": 100, "prompt_len": [5, 5], "output_len": [2, 2]}
    return build(WorkloadConfig, {**sizes, **values, "classes": list(classes)}, "workload")


def tagged(tokens, max_tokens, tags, slo=None, **said):
    return replace(request(tokens, max_tokens), options=RequestOptions(tags=tags, **said).checked(), slo=slo or Slo())


def test_classes_are_drawn_by_their_shares_with_their_own_lengths_and_the_loads():
    load = draw_load(workload(CHAT, BATCH, num_prompts=1000), 100)
    chat = [one for one in load.requests if one.options.tags == {"class": "chat"}]
    batch = [one for one in load.requests if one.options.tags == {"class": "batch"}]
    assert len(chat) + len(batch) == 1000 and 760 < len(chat) < 840
    assert {len(one.tokens) for one in chat} == {2, 3, 4} and {one.params.max_tokens for one in chat} == {1, 2, 3}
    assert min(len(one.tokens) for one in batch) >= 20 and {one.params.max_tokens for one in batch} == {2}
    assert {one.slo for one in chat} == {Slo(ttft_s=1.5)} and {one.slo for one in batch} == {Slo()}
    assert batch[0].options == RequestOptions(1, {"class": "batch"}, 9.0, "b")


def test_times_are_those_of_the_load_without_classes():
    plain, classed = (draw_load(workload(*classes, request_rate=3.0), 100) for classes in ((), (CHAT, BATCH)))
    assert [one.arrival_s for one in plain.requests] == [one.arrival_s for one in classed.requests]


def test_one_class_that_says_nothing_changes_nothing():
    plain, classed = (draw_load(workload(*classes, turns=[1, 3], num_prompts=9), 100) for classes in ((), ({},)))
    assert plain.requests == classed.requests


def test_all_turns_of_a_conversation_are_of_one_class():
    load = draw_load(workload(CHAT, BATCH, turns=[2, 4], num_prompts=40), 100)
    pairs = [(one, load.requests[one.follows]) for one in load.requests if one.follows is not None]
    assert pairs and all(one.options == before.options for one, before in pairs)
    assert len({one.options.priority for one in load.requests}) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tags": 3}, "workload.classes[0].tags is not a mapping but of type int"),
        (3, "workload.classes[0]=3 must be a mapping of the fields of a class"),
        ({"share": 0}, "workload.classes[0].share=0.0 must be a finite number above 0"),
        ({"shares": 1}, "unknown key 'workload.classes[0].shares'. Did you mean 'workload.classes[0].share'?"),
        ({"output_len": [4, 2**30]}, "workload.classes[0].output_len=[4, 1073741824] must be two whole numbers"),
        ({"prompt_len": [4, 2]}, "workload.classes[0].prompt_len=[4, 2] must be two whole numbers, 1 <= first"),
        (
            {"deadline_s": -1},
            "workload.classes[0]: deadline_s=-1.0 must be a finite number of seconds above 0, or None",
        ),
        ({"tags": {"Class": "a"}}, "workload.classes[0]: tags.Class: a tag's key is at most 32 characters"),
        ({"cache_salt": "x" * 257}, "workload.classes[0]: cache_salt has 257 characters; at most 256 are allowed"),
        ({"slo": {"ttft_s": 0}}, "workload.classes[0].slo.ttft_s=0.0 must be a finite number above 0"),
        (
            {"slo": {"ttf_s": 1}},
            "unknown key 'workload.classes[0].slo.ttf_s'. Did you mean 'workload.classes[0].slo.ttft_s'?",
        ),
    ],
)
def test_an_impossible_class_is_refused_by_its_place(values, message):
    with pytest.raises(ConfigError) as refused:
        workload(values)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_classes_are_a_list():
    with pytest.raises(ConfigError, match=r"^workload.classes is not a list; write workload.classes=\[...\]$"):
        build(WorkloadConfig, {"classes": 3}, "workload")


def test_a_trace_brings_its_own_classes():
    with pytest.raises(ConfigError, match=r"workload.classes=.* has no effect beside workload.trace=x"):
        build(WorkloadConfig, {"classes": [CHAT], "trace": "x"}, "workload")


def test_the_shipped_example_is_a_load_of_two_tenants():
    values = yaml.safe_load((CONF / "two_tenants.yaml").read_text())
    load = draw_load(build(WorkloadConfig, values, "workload"), 1000)
    tenants = [one.options.tags["tenant"] for one in load.requests]
    assert set(tenants) == {"acme", "globex"} and 0.6 < tenants.count("acme") / len(tenants) < 0.8


# --- through an engine, to figures


@pytest.fixture(scope="module")
def recording():
    """Steps take a second. The first step computes all prompts but the last, which comes too late for its deadline."""
    load = [
        tagged([1, 2, 3], 3, {"class": "chat", "tenant": "a.b"}, Slo(ttft_s=1.0), deadline_s=3),
        tagged([1, 2, 3], 5, {"class": "chat", "tenant": "c"}, Slo(ttft_s=0.5), deadline_s=3),
        tagged([4] * 8, 2, {"class": "batch"}, priority=2, cache_salt="b"),
        request([5], 1),
        tagged([], 2, {"class": "batch"}, deadline_s=99),
    ]
    return drive(engine_on(ManualClock()), Load(load))


def test_figures_by_tag_are_those_of_its_requests_alone(recording):
    metrics = summarise(recording, Slo())
    by_class = metrics["by_tag"]["class"]
    assert list(metrics["by_tag"]) == ["class", "tenant"] and list(by_class) == ["batch", "chat"]
    chat, batch = by_class["chat"], by_class["batch"]
    assert (chat["requests"], chat["output_tokens"], batch["requests"], batch["refused"]) == (2, 8, 2, 1)
    assert (chat["output_share"], batch["output_share"]) == (round(8 / 11, 4), round(2 / 11, 4))
    assert chat["output_tok_s"] == round(8 / recording.seconds, 1)
    assert chat["ttft_s"] == dict.fromkeys(STATISTICS, 1.0) and chat["queue_s"]["max"] == 0.0
    assert set(chat) == {*TAG_NUMBERS, *TAG_DISTRIBUTIONS}


def test_goodput_holds_each_request_to_its_own_bounds(recording):
    metrics = summarise(recording, Slo())
    by_class = metrics["by_tag"]["class"]
    assert (by_class["chat"]["slo_met"], by_class["batch"]["slo_met"]) == (0.5, None)
    assert by_class["chat"]["goodput_s"] == metrics["goodput_s"] == round(1 / recording.seconds, 3)
    loose = summarise(recording, Slo(e2e_s=100))  # of those that bring no bounds; the refused one keeps none
    assert loose["by_tag"]["class"]["batch"]["slo_met"] == 0.5
    assert loose["goodput_s"] == round(3 / recording.seconds, 3)


def test_deadlines_are_met_by_who_is_done_in_time_and_not_by_the_refused(recording):
    metrics = summarise(recording, Slo())
    assert metrics["deadlines_met"] == round(1 / 3, 4)
    assert [metrics["by_tag"]["class"][name]["deadlines_met"] for name in ("chat", "batch")] == [0.5, 0.0]
    assert metrics["by_tag"]["tenant"]["c"]["deadlines_met"] == 0.0


def test_an_objective_can_be_a_figure_of_a_tag(recording):
    metrics = summarise(recording, Slo())
    assert objective_value(metrics, "by_tag.class.chat.ttft_s.p99") == 1.0
    assert objective_value(metrics, "by_tag.tenant.a.b.slo_met") == 1.0
    assert objective_value(metrics, "by_tag.class.none.slo_met") is None


def test_what_requests_say_is_kept_in_their_records_and_plain_ones_say_nothing(recording, tmp_path):
    write_recording(recording, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert lines[0]["tags"] == {"class": "chat", "tenant": "a.b"} and lines[0]["slo"] == {"ttft_s": 1.0}
    assert (lines[2]["priority"], lines[2]["cache_salt"], "deadline_s" in lines[2]) == (2, "b", False)
    assert {"tags", "priority", "deadline_s", "cache_salt", "slo"}.isdisjoint(lines[3])
    assert list(read_recording(tmp_path).requests) == list(recording.requests)


def test_records_are_a_trace_of_the_same_classes(recording, tmp_path):
    write_recording(recording, tmp_path)
    lines = [line for line in (tmp_path / "requests.jsonl").read_text().splitlines() if '"error": null' in line]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    load = read_trace(WorkloadConfig(trace=str(tmp_path / "trace.jsonl")), 100)
    assert [dict(one.options.tags or {}) for one in load.requests] == [one.tags for one in recording.requests[:4]]
    assert [one.slo.bounds or None for one in load.requests] == [one.slo for one in recording.requests[:4]]


def test_a_load_without_tags_has_the_figures_it_had():
    engine = engine_on(ManualClock())
    assert {"by_tag", "deadlines_met"}.isdisjoint(summarise(drive(engine, Load([request([1], 1)])), Slo()))


@pytest.mark.parametrize("name", ["by_tag.class.chat.goodput_s", "by_tag.class.chat.ttft_s.p99", "deadlines_met"])
def test_an_objective_of_a_class_is_known_before_anything_runs(name):
    check_objective(name, Slo(), workload(CHAT, BATCH))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("by_tag.class.chart.goodput_s", r"takes a tag of workload.classes \(class.chat\) and one of requests, "),
        ("by_tag.class.chat.good", r"takes a tag of workload.classes \(class.chat\) and one of requests, "),
        ("deadlines_met", "no metric named objective=deadlines_met"),
    ],
)
def test_an_objective_that_no_class_has_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        check_objective(name, Slo(), workload(CHAT))


def test_goodput_is_an_objective_where_a_class_has_bounds():
    check_objective("goodput_s", Slo(), workload(CHAT))
    with pytest.raises(ConfigError, match="objective=goodput_s needs an objective of service"):
        check_objective("goodput_s", Slo(), workload(BATCH))


def test_a_terminal_shows_a_line_for_each_tag(recording):
    head, batch, chat, first, second = tag_lines(summarise(recording, Slo())["by_tag"])
    assert head.split()[:3] == ["requests", "tok/s", "share"]
    assert [line.split()[0] for line in (batch, chat, first, second)] == [
        "class=batch", "class=chat", "tenant=a.b", "tenant=c",
    ]  # fmt: skip
    assert chat.split()[1] == "2" and chat.split()[3] == "0.7273" and chat.split()[-1] == "0.5"
    assert batch.split()[-2] == "-"
