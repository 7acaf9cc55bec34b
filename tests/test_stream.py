"""Streams, stop strings and several completions on the bundled checkpoint, with its real tokenizer."""

import pytest

from hookline import LLM, SamplingParams
from hookline.core.outputs import FinishReason
from hookline.core.testing.fakes import check_engine

PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass ", "# naïve café: € 😀\n", "x" * 40]


def sampled(max_tokens=32, **options):
    return SamplingParams(temperature=0.9, max_tokens=max_tokens, seed=3, ignore_eos=True, **options)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request):
    with LLM(device="cpu", engine=dict(cpu_cache_gib=0.25, overlap=request.param)) as llm:
        yield llm


def leaves_nothing(llm):
    check_engine(llm.engine)
    return not llm.engine.queue.live and len(llm.output_processor) == 0


@pytest.mark.slow
def test_a_stream_is_generate_in_pieces(llm):
    expected = llm.generate(PROMPTS, sampled())
    pieces, ids, ends = [""] * 4, [[] for _ in PROMPTS], {}
    for delta in llm.stream(PROMPTS, sampled()):
        pieces[delta.prompt_index] += delta.text
        ids[delta.prompt_index] += delta.token_ids
        if delta.output is not None:
            ends[delta.prompt_index] = delta.output
    assert pieces == [output.text for output in expected] == [ends[place].text for place in range(4)]
    assert ids == [output.token_ids for output in expected]
    assert pieces[0] == llm.codec.decode(ids[0])
    assert leaves_nothing(llm)


def test_deltas_bring_the_log_probabilities_of_their_tokens(llm):
    [expected] = llm.generate(PROMPTS[0], sampled(12, logprobs=2))
    deltas = list(llm.stream(PROMPTS[0], sampled(12, logprobs=2)))
    assert [one for delta in deltas for one in delta.logprobs] == expected.logprobs == deltas[-1].output.logprobs
    assert all([one.token_id for one in delta.logprobs] == delta.token_ids for delta in deltas)
    assert next(llm.stream(PROMPTS[0], sampled(2))).logprobs is None


@pytest.mark.slow
def test_hot_nonsense_streams_as_it_decodes(llm):
    params = SamplingParams(temperature=50.0, max_tokens=80, seed=1, ignore_eos=True)
    for keep in True, False:
        *_, last = deltas = list(llm.stream("a", SamplingParams(**{**vars(params), "skip_special_tokens": keep})))
        text = "".join(delta.text for delta in deltas)
        assert text == last.output.text == llm.codec.decode(last.output.token_ids, skip_special_tokens=keep)


@pytest.mark.slow
def test_stop_strings_are_cut_out_of_the_free_text_wherever_token_boundaries_are(llm):
    [free] = llm.generate(PROMPTS[0], sampled())
    stops = [free.text[start : start + 5] for start in range(2, len(free.text) - 8, 5)]
    outputs = llm.generate([PROMPTS[0]] * len(stops), [sampled(stop=stop) for stop in stops])
    for stop, output in zip(stops, outputs, strict=True):
        assert output.text == free.text[: free.text.index(stop)]
        assert output.token_ids == free.token_ids[: len(output.token_ids)]
        assert stop in llm.codec.decode(output.token_ids)
        assert stop not in llm.codec.decode(output.token_ids[:-1])
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert leaves_nothing(llm)


def test_special_tokens_are_shown_if_asked_for(llm):
    eos = llm.codec.tokenizer.convert_tokens_to_ids(llm.codec.tokenizer.eos_token)
    assert llm.codec.decode([eos]) == ""
    assert llm.codec.decode([eos], skip_special_tokens=False) == llm.codec.tokenizer.eos_token


@pytest.mark.slow
def test_completions_of_a_prompt_differ_repeat_and_share_its_blocks(llm):
    prompt = "import collections\nimport functools\n\n\n" * 4
    [first], [again] = llm.generate(prompt, sampled(n=3)), llm.generate(prompt, sampled(n=3))
    assert [one.token_ids for one in first.completions] == [one.token_ids for one in again.completions]
    assert len({one.text for one in first.completions}) == 3
    assert first.others[0].num_cached_tokens > 0
    assert first.text == llm.generate(prompt, sampled())[0].text


def test_an_interrupted_generate_or_stream_leaves_nothing(llm):
    class Interrupts:
        def update(self, *counts):
            raise KeyboardInterrupt

        def close(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, sampled(n=2), progress=Interrupts())
    assert leaves_nothing(llm)
    for delta in llm.stream(PROMPTS, sampled(stop="\n\n", n=2)):
        if delta.text:
            break
    del delta
    assert leaves_nothing(llm)
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream(PROMPTS, sampled()):
            raise KeyboardInterrupt
    assert leaves_nothing(llm)
    assert len(llm.generate(PROMPTS, sampled(2))) == 4
