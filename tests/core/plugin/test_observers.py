"""Observers that a configuration names: how they are chosen, made, called and blamed."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from hookline.core.config.settings import validate
from hookline.core.contracts import Needs, Observer
from hookline.core.errors import ConfigError, PluginError, RequestError
from hookline.core.outputs import FinishReason
from hookline.core.plugin.check_plugin import new_manager
from hookline.core.plugin.observers import Observers, make_observers
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import drain
from tests.core.plugin_fakes import OPTIONS, full_plugin, host_with, plugin_module, registering


@dataclass
class TallyConfig:
    step: int = 1


class Tally(Observer):
    """Counts what it sees; has no method for the start."""

    def __init__(self, config):
        self.config, self.num_steps, self.ends, self.is_stopped = config, 0, [], False
        self.generated, self.prompt = 0, 0

    def on_step_end(self, stats):
        self.num_steps += self.config.step
        self.generated += stats.num_generated_tokens
        self.prompt += stats.num_prompt_tokens

    def on_request_end(self, output):
        self.ends.append(output.finish_reason)

    def on_engine_stop(self, engine):
        self.is_stopped = True


class Clumsy(Observer):
    made: ClassVar = []

    def __init__(self, config):
        if not self.made:
            raise KeyError("oops")

    def on_step_end(self, stats):
        raise KeyError("oops")


HERE = "tests.core.plugin.test_observers"


def host():
    return host_with(
        full_plugin(),
        plugin_module(
            register_observers=registering("observer", "tally", "other", target=f"{HERE}:Tally", config=TallyConfig)
        ),
        plugin_module(register_observers=registering("observer", "clumsy", target=f"{HERE}:Clumsy")),
        plugin_module(
            register_observers=registering("observer", "absent", target="no:No", needs=Needs(packages=("no_such",)))
        ),
    )


def chosen(observers):
    return validate({**OPTIONS, "observers": observers}, host()).observers


@pytest.mark.parametrize("value", ["tally", ["tally"], [{"name": "tally"}], ("tally",)])
def test_an_observer_is_a_name_or_a_mapping_with_one(value):
    [option] = chosen(value)
    assert option.name == "tally" and option.config == TallyConfig(step=1)


def test_observers_have_fields_and_there_may_be_several_or_none():
    assert [option.config.step for option in chosen([{"name": "tally", "step": 3}, "other"])] == [3, 1]
    assert chosen([]) == chosen(None) == ()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            ["taly"],
            PluginError,
            "no observer named 'taly'. Did you mean 'tally'? Available: absent, clumsy, other",
        ),
        (
            [{"name": "tally", "stp": 1}],
            ConfigError,
            "unknown key 'observers.tally.stp'. Did you mean 'observers.tally.step'?",
        ),
        ([{"name": "tally", "step": "x"}], ConfigError, "observers.tally.step='x' is not an int"),
        ([{"name": "clumsy", "step": 1}], ConfigError, "unknown key 'observers.clumsy.step'. Available: none"),
        ([{"step": 1}], ConfigError, "observers: {'step': 1} has no name"),
        (["tally", {"name": "tally"}], ConfigError, "observers names 'tally' twice"),
        ({"name": "tally"}, ConfigError, "observers={'name': 'tally'} is not a list of names"),
        ([3], ConfigError, "observers=3 is not a mapping of fields"),
    ],
)
def test_a_mistake_names_the_key_and_the_value(value, error, message):
    with pytest.raises(error) as caught:
        chosen(value)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_observer_that_cannot_be_used_or_made_says_why_before_anything_is_loaded():
    with pytest.raises(PluginError, match=r"observer 'absent' of .* cannot be used here: package 'no_such' is not"):
        make_observers(chosen(["absent"]))
    with pytest.raises(
        PluginError, match=r"observer 'clumsy' of .* fails in __init__: KeyError: 'oops' \(.*, in __init__\)"
    ):
        make_observers(chosen(["clumsy"]))


class Misspelt(Observer):
    def __init__(self, config):
        pass

    def on_step_end(self, stats):
        pass

    def on_step_start(self):
        pass


class Blind(Observer):
    def __init__(self, config):
        pass


class Deaf(Observer):
    def __init__(self, config):
        pass

    def on_step_end(self):
        pass


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Misspelt", "nothing calls its on_step_start"),
        (
            "Blind",
            "it has none of the methods on_engine_start, on_request_begin, on_first_token, on_token_gaps, ",
        ),
        ("Deaf", "its on_step_end cannot be called with (stats)"),
        ("HERE", "it is a str, not a class"),
    ],
)
def test_a_class_that_would_not_be_called_as_it_thinks_is_refused(target, message):
    plugin = plugin_module(register_observers=registering("observer", "odd", target=f"{HERE}:{target}"))
    options = validate({**OPTIONS, "observers": ["odd"]}, host_with(full_plugin(), plugin)).observers
    with pytest.raises(PluginError) as caught:
        make_observers(options)
    assert f"does not keep its contract: {message}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_chosen_observer_sees_its_engine_and_no_other():
    made = make_observers(chosen([{"name": "tally", "step": 2}]))
    engine = fake_engine(PlainScheduler(), observers=Observers(new_manager(), made))
    other = fake_engine(PlainScheduler(), observers=Observers(new_manager()))
    for one in engine, other:
        one.add([1, 2, 3], SamplingParams(max_tokens=4, seed=1))
        drain(one)
        one.close()
    tally = engine.observers.chosen["tally"]
    assert (tally.num_steps, tally.ends, tally.is_stopped) == (8, [FinishReason.LENGTH], True)
    assert (tally.generated, tally.prompt) == (4, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_generated_tokens_are_those_of_the_outputs_and_not_the_discarded_ones(overlap):
    free = completion(1, [1, 2, 3], 8, 50)
    made = make_observers(chosen(["tally"]))
    options = {"overlap": overlap, "eos_token_ids": [free[4]], "num_blocks": 12}
    engine = fake_engine(PlainScheduler(), observers=Observers(new_manager(), made), **options)
    for seed in range(6):
        engine.add([1, 2, 3], SamplingParams(max_tokens=20, seed=seed))
    outputs = drain(engine)
    assert made["tally"].generated == sum(len(output.token_ids) for output in outputs)
    assert made["tally"].prompt == 18


def test_a_chosen_observer_that_raises_ends_no_request_and_the_others_are_told_as_before(monkeypatch):
    monkeypatch.setattr(Clumsy, "made", [1])
    made = make_observers(chosen(["clumsy", "tally"]))
    engine = fake_engine(PlainScheduler(), observers=Observers(new_manager(), made))
    for seed in range(3):
        engine.add([1, 2], SamplingParams(max_tokens=2, seed=seed))
    assert [output.finish_reason for output in drain(engine)] == [FinishReason.LENGTH] * 3
    assert made["tally"].ends == [FinishReason.LENGTH] * 3 and made["tally"].generated == 6
    place = r"\(.*test_observers.py:\d+, in on_step_end\)"
    who = r"observer 'clumsy' of plugin 'plugin2' \(their-dist 1.2\)"
    with pytest.raises(PluginError, match=rf"on_step_end of {who} raised KeyError: 'oops' {place}"):
        engine.close()
    assert made["tally"].is_stopped


# --- events of requests


class Diary(Observer):
    """Everything it is told of requests, in order."""

    def __init__(self, config=None):
        self.events, self.begun, self.gaps = [], [], []

    def on_request_begin(self, info):
        self.begun.append(info)
        self.events.append(("begin", info.request_id))

    def on_first_token(self, info, first_token_s):
        assert info in self.begun
        self.events.append(("first", info.request_id, first_token_s))

    def on_token_gaps(self, gaps_s):
        self.gaps.extend(gaps_s.tolist())

    def on_request_end(self, output):
        self.events.append(("end", output.request_id, output.tags))


def kept_diary(**options):
    diary = Diary()
    return diary, fake_engine(PlainScheduler(), observers=Observers(new_manager(), {"diary": diary}), **options)


def test_a_request_begins_has_a_first_token_and_ends_with_what_it_says_of_itself():
    diary, engine = kept_diary()
    params = SamplingParams(max_tokens=3, seed=1)
    options = RequestOptions(priority=2, tags={"tenant": "acme"}, deadline_s=5)
    id_ = engine.add([1, 2, 3], params, arrival_s=7.0, options=options)
    [output] = drain(engine)
    first_s = output.timings.first_token_s
    assert diary.events == [("begin", id_), ("first", id_, first_s), ("end", id_, {"tenant": "acme"})]
    [info] = diary.begun
    assert (info.request_id, info.arrival_s, info.num_prompt_tokens, info.params.max_tokens) == (id_, 7.0, 3, 3)
    assert (info.priority, info.tags, info.deadline_s) == (2, {"tenant": "acme"}, 5.0)


def test_a_refused_request_only_ends_and_an_aborted_one_needs_no_first_token():
    diary, engine = kept_diary()
    with pytest.raises(RequestError) as refused:
        engine.add([], SamplingParams(), options=RequestOptions(tags={"a": "b"}))
    engine.refuse([], refused.value, options=RequestOptions(tags={"a": "b"}, deadline_s=-1))
    engine.refuse([], refused.value, options=RequestOptions(tags={"a": "b"}))
    engine.abort([engine.add([1], SamplingParams())])
    assert diary.events == [("end", 0, {"a": "b"}), ("end", 1, {"a": "b"}), ("begin", 2), ("end", 2, {})]


def test_a_first_token_is_told_once_however_often_a_request_is_preempted():
    diary, engine = kept_diary(num_blocks=10, max_model_len=40)
    for seed in range(4):
        engine.add([seed + 1] * 8, SamplingParams(max_tokens=20, seed=seed))
    outputs = drain(engine)
    assert sum(output.num_preemptions for output in outputs) > 0
    assert sorted(event[1] for event in diary.events if event[0] == "first") == [0, 1, 2, 3]
    assert len(diary.gaps) == sum(len(output.token_ids) - 1 for output in outputs)


def test_gaps_add_up_to_the_time_that_a_request_generated():
    diary, engine = kept_diary()
    now = [100.0]
    engine.clock = lambda: now[0]
    engine.add([1, 2, 3], SamplingParams(max_tokens=4, seed=1))
    for gap_s in (1.0, 0.25, 0.5, 2.0):
        now[0] += gap_s
        engine.step()
    assert diary.gaps == [0.25, 0.5, 2.0]


def test_without_listeners_nothing_is_made_for_them(monkeypatch):
    def fail(*arguments):
        raise AssertionError("nobody listens")

    monkeypatch.setattr("hookline.core.requests.request.Request.begin", fail)
    monkeypatch.setattr("hookline.core.requests.running_table.RunningTable.gaps_s", fail)
    engine = fake_engine(PlainScheduler(), observers=Observers(new_manager(), make_observers(chosen(["tally"]))))
    engine.add([1], SamplingParams(max_tokens=2))
    assert len(drain(engine)) == 1


def test_an_observer_that_raises_at_the_begin_ends_no_request():
    class Strict(Observer):
        def __init__(self, config=None):
            pass

        def on_request_begin(self, info):
            raise KeyError("oops")

    engine = fake_engine(PlainScheduler(), observers=Observers(new_manager(), {"strict": Strict()}))
    engine.add([1], SamplingParams(max_tokens=1))
    assert [output.finish_reason for output in drain(engine)] == [FinishReason.LENGTH]
    with pytest.raises(PluginError, match="on_request_begin of observer 'strict' raised KeyError"):
        engine.close()


class Greedy(Observer):
    """Empties all that it is shown."""

    seen: ClassVar = []

    def on_request_end(self, output):
        self.seen.append(list(output.token_ids))
        for one in (output.token_ids, output.prompt_token_ids, output.logprobs, output.tags, output.others):
            if one is not None:
                one.clear()
        output.text = "mine"


def test_an_observer_cannot_change_what_the_caller_gets_or_another_sees():
    observers = Observers(chosen={"first": Greedy(None), "second": Greedy(None)})
    engine = fake_engine(PlainScheduler(), observers=observers)
    engine.add(
        [1, 2, 3], SamplingParams(max_tokens=4, seed=1, ignore_eos=True), options=RequestOptions(tags={"tenant": "a"})
    )
    (output,) = drain(engine)
    assert len(output.token_ids) == 4 and output.prompt_token_ids == [1, 2, 3]
    assert output.tags == {"tenant": "a"} and output.text != "mine"
    assert Greedy.seen == [output.token_ids] * 2
