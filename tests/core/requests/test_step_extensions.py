"""Logits processors on the host: who takes what, what is refused, and what a step brings to the ranks."""

import tracemalloc
from dataclasses import dataclass, field

import pytest

from hookline.core.contracts import FromSamplingParams, LogitsProcessor, Needs, RequestFacts
from hookline.core.engine.step_builder import ArgumentWriter
from hookline.core.errors import RequestError
from hookline.core.plugin.needs import Facts
from hookline.core.plugin.registry import PROCESSOR, Entry, ExtensionOption, Origin
from hookline.core.requests.request import Request
from hookline.core.requests.step_extensions import (
    MAX_CACHED_KEY_BYTES,
    MAX_CACHED_KEYS_BYTES,
    NOTHING,
    InstalledExtensions,
)
from hookline.core.sampling_params import SamplingParams
from hookline.core.step.message import Step
from tests.core.faulty_processors import PlainProcessorArguments
from tests.core.plugin_fakes import host_with, plugin_module, registering

FACTS = RequestFacts(3, 1.0, frozenset(), 50)
PLAIN = "tests.core.faulty_processors:PlainProcessor"


@dataclass
class TopArguments(FromSamplingParams):
    top_k: int = 0


class NoEncode(LogitsProcessor):
    def __init__(self, spec):
        self.spec = spec

    def process(self, logits_NV, rows):
        return logits_NV


@dataclass
class ListArguments:
    tokens: list[int] = field(default_factory=list)


@dataclass
class TextArguments:
    text: str = ""


def entry(name, config=PlainProcessorArguments, target=PLAIN, **options):
    return Entry(PROCESSOR, name, target, Origin("theirs", "m", "their-dist", "1"), config, **options)


def prepare(params, *entries, facts=None):
    return InstalledExtensions.of(entries, facts).prepare(params.resolved({}), FACTS)


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        (
            {"shfit": {}},
            "unknown key 'sampling.extra_args.shfit'. Did you mean 'sampling.extra_args.shift'? Available: shift",
        ),
        (
            {"shift": {"amuont": 1.0}},
            "unknown key 'sampling.extra_args.shift.amuont'. Did you mean 'sampling.extra_args.shift.amount'?",
        ),
        ({"shift": {"amount": "much"}}, "sampling.extra_args.shift.amount='much' is not a float"),
        ({"shift": {"amount": "2.5"}}, "sampling.extra_args.shift.amount='2.5' is a text, not a float"),
        ({"shift": {"token": "2"}}, "sampling.extra_args.shift.token='2' is a text, not an int"),
        ({"top": {"top_k": 1}}, "unknown key 'sampling.extra_args.top'"),
    ],
)
def test_unknown_names_and_wrong_values_are_refused_with_the_near_miss(extra_args, message):
    entries = [entry("shift"), entry("top", TopArguments)]
    with pytest.raises(RequestError) as caught:
        prepare(SamplingParams(extra_args=extra_args), *entries)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RequestError):
        InstalledExtensions.of(entries).check(SamplingParams(extra_args=extra_args))


def with_setting(params, **setting):
    one = entry("shift")
    settings = {"shift": ExtensionOption(one, None, PlainProcessorArguments(**setting))}
    installed = InstalledExtensions.of([one, entry("other")], None, settings)
    installed.check(params)
    return installed.prepare(params.resolved({}), FACTS)


def test_what_the_engine_says_holds_for_requests_that_say_nothing_and_their_own_fields_go_before():
    own = prepare(SamplingParams(extra_args={"shift": {"amount": 2.5}}), entry("shift"), entry("other"))
    assert same(with_setting(SamplingParams(), amount=2.5), own)
    assert same(with_setting(SamplingParams(extra_args={"shift": {"amount": 2.5}}), amount=9.0), own)
    assert same(with_setting(SamplingParams(extra_args={"shift": {}}), amount=2.5), own)
    off = SamplingParams(extra_args={"shift": {"amount": PlainProcessorArguments().amount}})
    assert with_setting(off, amount=2.5).records == ()


def same(one, other):
    pairs = zip(one.records, other.records, strict=True)
    return one.bits == other.bits and all(a == b and (c == d).all() for (a, c), (b, d) in pairs)


def test_an_engine_without_settings_makes_nothing_of_requests_that_ask_for_nothing():
    assert prepare(SamplingParams(), entry("shift")) is NOTHING
    assert with_setting(SamplingParams(), amount=1.0) is not NOTHING


def test_a_parameter_that_no_processor_takes_is_refused():
    with pytest.raises(RequestError, match=r"sampling.top_k=3: no step extension that takes it is loaded here"):
        prepare(SamplingParams(top_k=3), entry("shift"))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (entry("shift", target="nowhere:Nothing"), "processor 'shift' of plugin 'theirs'"),
        (
            entry("shift", target=f"{__name__}:TopArguments"),
            "does not keep its contract",
        ),
        (entry("shift", needs=Needs(devices=("cuda",))), "does not fit: device is cpu, needs cuda"),
        (entry("shift", ListArguments, f"{__name__}:NoEncode"), "needs encode and load"),
    ],
)
def test_a_processor_that_cannot_be_used_is_named_and_only_when_asked_for(broken, message):
    facts = Facts("cpu", "float32")
    assert prepare(SamplingParams(), broken, facts=facts) is NOTHING
    with pytest.raises(RequestError, match=message):
        given = {"tokens": [1]} if broken.arguments is ListArguments else {"amount": 1.0}
        prepare(SamplingParams(extra_args={"shift": given}), broken, facts=facts)


def test_arguments_travel_as_columns_floats_first_then_what_was_encoded():
    prepared = prepare(SamplingParams(extra_args={"shift": {"amount": 1.0, "token": 7}}), entry("shift"))
    assert [(index, values.tolist()) for index, values in prepared.records] == [(0, [0x3F800000, 7, 7])]
    assert prepared.used(0) == prepared.used(99) == 1


@pytest.mark.parametrize("encoded", [None, [1.5], "ab", ["7"], 3])
def test_only_whole_numbers_are_encoded(monkeypatch, encoded):
    from tests.core.faulty_processors import PlainProcessor

    monkeypatch.setattr(PlainProcessor, "encode", staticmethod(lambda arguments, request: encoded))
    with pytest.raises(RequestError, match=r"breaks its contract in encode: it returned .*, which are not whole numb"):
        prepare(SamplingParams(extra_args={"shift": {"amount": 1.0}}), entry("shift"))


def test_what_is_encoded_needs_a_load(monkeypatch):
    from tests.core.faulty_processors import PlainProcessor

    monkeypatch.setattr(PlainProcessor, "load", LogitsProcessor.load)
    prepare(SamplingParams(extra_args={"shift": {"amount": 1.0}}), entry("shift"))
    with pytest.raises(RequestError, match=r"in encode: it returned \[3\], and the class has no load to get them"):
        prepare(SamplingParams(extra_args={"shift": {"token": 3}}), entry("shift"))


def test_processors_run_in_descending_priority():
    stages = InstalledExtensions.of([entry("a"), entry("b", priority=5), entry("c", priority=-1)]).stages
    assert [stage.entry.name for stage in stages] == ["b", "a", "c"]


def test_a_processor_may_end_after_some_draws(monkeypatch):
    from tests.core.faulty_processors import PlainProcessor

    monkeypatch.setattr(PlainProcessor, "num_draws", staticmethod(lambda arguments, request: 2), raising=False)
    prepared = prepare(SamplingParams(extra_args={"shift": {"amount": 1.0}}), entry("shift"))
    assert [prepared.used(count) for count in range(4)] == [1, 1, 0, 0]


def make_request(id, *extra, row=0, entries=None):
    params = SamplingParams(extra_args=dict(extra)).resolved({})
    prepared = InstalledExtensions.of(entries or [entry("one"), entry("two")]).prepare(params, FACTS)
    request = Request(id, [1, 2, 3], params, max_tokens=4, block_size=4, seed=0, prepared=prepared)
    request.row = row
    return request


def test_a_row_that_changes_hands_gets_defaults_for_what_its_last_owner_used():
    writer = ArgumentWriter(4)
    first = make_request(0, ("one", {"amount": 1.0}), ("two", {"amount": 2.0}))
    step = Step(**writer.sections([first], [], [first]))
    assert (step.extension_rows.tolist(), step.extension_ids.tolist()) == ([0, 0], [0, 1])
    assert step.extension_lens.tolist() == [2, 2] and step.extensions == 3
    writer.forget(first)
    second = make_request(1, ("two", {"amount": 5.0}))
    step = Step(**writer.sections([second], [], [second]))
    assert (step.extension_ids.tolist(), step.extension_lens.tolist(), step.extensions) == ([0, 1], [0, 2], 2)
    writer.forget(second)
    third = make_request(2)
    step = Step(**writer.sections([third], [], [third]))
    assert (step.extension_ids.tolist(), step.extension_lens.tolist(), step.extensions) == ([1], [0], 0)
    step = Step(**writer.sections([make_request(3)], [], []))
    assert not len(step.extension_rows)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config must be the dataclass of a request's arguments; it is None"),
        (dict, "config dict is not a dataclass"),
    ],
)
def test_a_registration_without_arguments_is_refused(config, message):
    host = host_with(plugin_module(register_processors=registering("processor", "shift", config=config)))
    assert message in host.problems[0].cause


def test_arguments_from_sampling_params_must_be_fields_of_it():
    @dataclass
    class Wrong(FromSamplingParams):
        top_q: int = 0

    host = host_with(plugin_module(register_processors=registering("processor", "shift", config=Wrong)))
    assert "config Wrong extends FromSamplingParams, which has no field 'top_q'" in host.problems[0].cause


def test_a_plugin_may_register_processors_alone():
    host = host_with(
        plugin_module(register_processors=registering("processor", "shift", config=PlainProcessorArguments))
    )
    assert not host.problems and host.registry.find(PROCESSOR, "shift") is not None


@pytest.mark.slow
def test_what_is_kept_of_ended_requests_is_bounded_in_bytes():
    installed = InstalledExtensions.of([entry("text", TextArguments)])
    tracemalloc.start()
    for seed in range(300):
        installed.check(SamplingParams(extra_args={"text": {"text": f"{seed:04}" * 4000}}))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert installed._built and kept < 3 * MAX_CACHED_KEYS_BYTES


def test_large_arguments_are_not_kept_and_small_ones_are_built_once(monkeypatch):
    built = []
    built_here = "hookline.core.requests.step_extensions.build"
    monkeypatch.setattr(built_here, lambda cls, given, prefix, **_: built.append(given) or cls(**given))
    installed = InstalledExtensions.of([entry("text", TextArguments)])
    small, large = {"text": "a"}, {"text": "a" * MAX_CACHED_KEY_BYTES}
    for given in (small, large, small, large):
        installed.check(SamplingParams(extra_args={"text": given}))
    assert built == [small, large, large]
