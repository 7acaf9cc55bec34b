"""What `generate` and `stream` of the blocking front say of each request, over a fake engine."""

import pytest

from hookline.core.errors import RequestError
from hookline.core.frontend.llm import LLM
from hookline.core.outputs import FinishReason
from tests.core.frontend.test_output_processor import PROMPT, output_processor, params


@pytest.fixture
def llm():
    llm = LLM.__new__(LLM)
    llm.output_processor = output_processor()
    return llm


def infos(outputs):
    return [(output.priority, output.tags, output.deadline_s) for output in outputs]


def test_one_value_is_for_all_prompts(llm):
    outputs = llm.generate([PROMPT, PROMPT], params(1), priority=2, tags={"tenant": "acme"}, deadline_s=3)
    assert infos(outputs) == [(2, {"tenant": "acme"}, 3.0)] * 2


def test_a_list_has_one_value_for_each_prompt(llm):
    given = {"priority": [0, 1], "tags": [{"tenant": "acme"}, None], "deadline_s": [None, 0.5]}
    wanted = [(0, {"tenant": "acme"}, None), (1, {}, 0.5)]
    assert infos(llm.generate([PROMPT, PROMPT], params(1), **given)) == wanted
    assert infos(delta.output for delta in llm.stream([PROMPT, PROMPT], params(1), **given)) == wanted


def test_salts_can_be_one_each(llm):
    prompt = list(range(1, 22))
    outputs = llm.generate([prompt] * 3, params(1), cache_salt=["a", "b", "a"])
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 20]


def test_all_completions_of_a_prompt_say_the_same(llm):
    [output] = llm.generate([PROMPT], params(1, n=3), tags={"class": "chat"})
    assert [one.tags for one in output.completions] == [{"class": "chat"}] * 3


def test_a_bad_value_refuses_its_own_request_alone(llm):
    outputs = llm.generate([PROMPT] * 3, params(1), tags=[{"a": "b"}, {"A": "b"}, {}], deadline_s=[1, 1, -1])
    assert [output.finish_reason for output in outputs] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.ERROR,
    ]
    assert outputs[1].error.startswith("tags.A: a tag's key is") and outputs[2].error.startswith("deadline_s=-1 must")


def test_time_limits_can_be_one_each(llm):
    prompts = [PROMPT] * 3
    outputs = llm.generate(prompts, params(3), timeout_s=[None, 1e-9, 60])
    streamed = [delta.output for delta in llm.stream(prompts, params(3), timeout_s=[None, 1e-9, 60]) if delta.output]
    for found in outputs, sorted(streamed, key=lambda output: output.request_id):
        assert [output.finish_reason for output in found] == [
            FinishReason.LENGTH,
            FinishReason.ABORT,
            FinishReason.LENGTH,
        ]


class Bar:
    num_finished, is_closed = 0, False

    def update(self, num_finished, *counts):
        self.num_finished += num_finished

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("progress", [None, False, True])
def test_a_call_may_show_a_bar(llm, progress, capsys):
    llm.generate([PROMPT] * 3, params(1), progress=progress)
    assert ("/3" in capsys.readouterr().err) is bool(progress)


def test_a_bar_may_be_the_caller_s_own(llm):
    bar = Bar()
    llm.generate([PROMPT] * 3, params(1), progress=bar)
    assert (bar.num_finished, bar.is_closed) == (3, True)


@pytest.mark.parametrize("progress", [1, print, object])
def test_what_is_no_bar_is_refused_before_the_work(llm, progress):
    with pytest.raises(RequestError, match=r"^progress=.* must be a bool, or have the methods update and close$"):
        llm.generate([PROMPT], params(1), progress=progress)
    assert llm.output_processor.engine.last_stats is None


@pytest.mark.parametrize("documents", [None, 5])
def test_documents_that_are_none_are_refused(llm, documents):
    with pytest.raises(RequestError, match=f"score compares texts, and documents={documents} holds none"):
        llm.score("query", documents)


@pytest.mark.parametrize("name", ["priority", "tags", "deadline_s", "cache_salt", "timeout_s"])
def test_another_number_of_values_than_prompts_is_refused(llm, name):
    with pytest.raises(RequestError) as refused:
        llm.generate([PROMPT] * 3, params(1), **{name: [None, None]})
    assert str(refused.value) == f"{name} has 2 values for 3 prompts; pass one, or one for each prompt"


def test_an_engine_that_knows_its_tags_refuses_others(llm):
    llm.output_processor = output_processor(tag_keys=("tenant",))
    known, unknown = llm.generate([PROMPT] * 2, params(1), tags=[{"tenant": "acme"}, {"tennant": "acme"}])
    assert known.tags == {"tenant": "acme"}
    assert unknown.error == "tags.tennant is unknown. Did you mean 'tenant'? engine.tag_keys allows: tenant"
