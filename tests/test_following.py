"""Processors that follow their requests' tokens on the host: state, ends by content, faults, preemption, overlap."""

import os

import pytest

from hookline import LLM, SamplingParams
from tests.following import forced

pytestmark = pytest.mark.slow
PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def params(max_tokens=12, min_tokens=0, n=1, **arguments):
    extra = {"tally": {"force": True, **arguments}}
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, min_tokens=min_tokens, n=n, ignore_eos=True, extra_args=extra
    )


@pytest.fixture(scope="module", params=[False, True], ids=["", "overlap"])
def llm(request):
    before = os.environ.get("HOOKLINE_PLUGINS")
    os.environ["HOOKLINE_PLUGINS"] = "tests.following"
    sizes = dict(num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48)
    with LLM(device="cpu", engine=dict(**sizes, overlap=request.param)) as llm:
        yield llm
    os.environ.pop("HOOKLINE_PLUGINS")
    if before is not None:
        os.environ["HOOKLINE_PLUGINS"] = before


def test_each_draw_knows_what_the_host_made_of_the_token_before_it(llm):
    first, other, last = llm.generate([[1, 2], [3], [4, 5]], [params(), PLAIN, params(7)])
    assert first.token_ids == forced(12) and last.token_ids == forced(7)
    assert other.token_ids == llm.generate([[3]], PLAIN)[0].token_ids


def test_its_state_survives_preemptions(llm):
    outputs = llm.generate([[number] * 6 for number in range(1, 5)], params(20))
    assert sum(output.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == [forced(20)] * 4


def test_it_ends_a_request_by_what_it_holds_and_others_go_on(llm):
    ended, other = llm.generate([[1, 2], [3]], [params(stop_after=5), params()])
    assert ended.token_ids == forced(5) and ended.finish_reason.value == "stop"
    assert ended.stop_reason == "enough" and ended.text == llm.codec.decode(forced(4))
    assert other.token_ids == forced(12) and other.finish_reason.value == "length"


def test_each_completion_of_a_prompt_has_a_state_of_its_own(llm):
    (output,) = llm.generate([[1, 2]], params(n=2, stop_after=6))
    assert [one.token_ids for one in output.completions] == [forced(6)] * 2


def test_nothing_ends_before_min_tokens(llm):
    (output,) = llm.generate([[1, 2]], params(stop_after=3, min_tokens=5))
    assert output.token_ids == forced(12)


def test_a_text_that_is_streamed_ends_there_too(llm):
    deltas = list(llm.stream([[1, 2]], params(stop_after=5)))
    assert "".join(delta.text for delta in deltas) == llm.codec.decode(forced(4)) == deltas[-1].output.text


def test_it_knows_the_texts_of_tokens(llm):
    text = llm.codec.decode(forced(8)[-1:])
    wanted = next(place for place, token in enumerate(forced(8), 1) if text in llm.codec.decode([token]))
    (output,) = llm.generate([[1, 2]], params(stop_text=text))
    assert output.token_ids == forced(wanted) and output.stop_reason == f"found {text!r}"


def test_one_that_fails_on_a_token_ends_its_request_alone(llm):
    failed, other = llm.generate([[1, 2], [3]], [params(fail_after=4), params()])
    assert failed.finish_reason.value == "error" and failed.token_ids == forced(4)
    assert failed.error.startswith(f"request {failed.request_id}: processor 'tally' of plugin 'tests.following'")
    assert "fails in on_token: ValueError: on purpose (" in failed.error and "\n" not in failed.error
    assert other.token_ids == forced(12)


def test_mirostat_is_the_same_after_preemptions_and_holds_the_surprise_near_its_target(llm):
    def asked(seed, tau):
        extra = {"mirostat": {"tau": tau, "eta": 0.4}}
        return SamplingParams(max_tokens=24, seed=seed, ignore_eos=True, logprobs=0, extra_args=extra)

    prompts = [[number + 10] * 6 for number in range(4)]
    outputs = llm.generate(prompts, [asked(seed, 2.0) for seed in range(4)])
    assert sum(output.num_preemptions for output in outputs) > 0
    alone = [llm.generate([prompt], asked(seed, 2.0))[0] for seed, prompt in enumerate(prompts[:2])]
    assert [output.token_ids for output in outputs[:2]] == [output.token_ids for output in alone]
    surprise = [-one.logprob / 0.6931 for output in outputs for one in output.logprobs]
    loose = [-one.logprob / 0.6931 for output in llm.generate(prompts, asked(0, 8.0)) for one in output.logprobs]
    assert abs(sum(surprise) / len(surprise) - 2.0) < 0.7 < sum(loose) / len(loose) - 2.0


def test_mirostat_for_all_requests_of_an_engine_is_that_of_each_which_may_say_otherwise(llm):
    def asked(**own):
        extra = {"mirostat": own} if own else {}
        return SamplingParams(max_tokens=12, seed=1, ignore_eos=True, logprobs=0, extra_args=extra)

    given = [asked(tau=2.0, eta=0.4), asked(tau=8.0, eta=0.4), asked(), asked(tau=0.5)]
    prompts = [[10] * 6] * 4
    wanted = [output.token_ids for output in llm.generate(prompts, given)]
    assert len({tuple(ids) for ids in wanted}) > 2
    sizes = dict(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=48)
    with LLM(device="cpu", engine=sizes, processors={"mirostat": {"tau": 2.0, "eta": 0.4}}) as other:
        found = other.generate(prompts, [asked(), asked(tau=8.0), asked(tau=0.0), asked(tau=0.5, eta=0.1)])
    assert [output.token_ids for output in found] == wanted


def test_mirostat_without_logprobs_is_refused(llm):
    (output,) = llm.generate([[1]], SamplingParams(extra_args={"mirostat": {"tau": 1.0}}))
    assert output.error == "mirostat follows the tokens' log-probabilities: set sampling.logprobs=0 or more"
