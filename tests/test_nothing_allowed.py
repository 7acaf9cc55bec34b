"""A request whose parameters together forbid every token ends with an error, and draws none of them."""

import pytest

from hookline import LLM, SamplingParams
from hookline.core.outputs import FinishReason
from hookline.core.testing.fakes import check_engine

TOKEN = 300


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request):
    with LLM(device="cpu", engine=dict(cpu_cache_gib=0.25, overlap=request.param)) as llm:
        yield llm


def forbidding(**options):
    return SamplingParams(allowed_token_ids=[TOKEN], bad_words=[[TOKEN]], max_tokens=4, **options)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, ""),
        ({"temperature": 0}, ""),
        ({"temperature": 0.8, "top_p": 0.5, "top_k": 5, "min_p": 0.1}, "sampling.top_p, "),
        ({"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {TOKEN: 100}}, "sampling.logit_bias, "),
        ({"logprobs": 2, "prompt_logprobs": 1}, ""),
    ],
)
def test_a_request_that_may_draw_nothing_ends_with_an_error_that_names_what_forbids_it(llm, options, others):
    prompts = ["import os", "def f", "class A"]
    plain = SamplingParams(max_tokens=4, temperature=0)
    nothing, *found = llm.generate(prompts, [forbidding(**options), plain, plain])
    assert (nothing.finish_reason, nothing.token_ids, nothing.text) == (FinishReason.ERROR, [], "")
    assert not nothing.is_fault and "no token is left that may be drawn" in nothing.error
    for name in ("sampling.allowed_token_ids, ", "sampling.bad_words", others):
        assert name in nothing.error
    assert [one.token_ids for one in found] == [one.token_ids for one in llm.generate(prompts[1:], plain)]
    check_engine(llm.engine)


def test_what_may_be_drawn_at_first_is_kept_when_later_nothing_may(llm):
    params = SamplingParams(allowed_token_ids=[TOKEN], bad_words=[[TOKEN, TOKEN]], max_tokens=4, logprobs=1)
    [output] = llm.generate("import os", params)
    assert (output.finish_reason, output.token_ids, len(output.logprobs)) == (FinishReason.ERROR, [TOKEN], 1)


def test_min_tokens_forbids_too(llm):
    eos = llm.codec.tokenizer.eos_token_id
    params = SamplingParams(allowed_token_ids=[TOKEN, eos], bad_words=[[TOKEN]], min_tokens=2, max_tokens=4)
    [output] = llm.generate("import os", params)
    assert output.finish_reason is FinishReason.ERROR and "sampling.min_tokens together forbid all" in output.error


def test_a_grammar_and_words_that_it_needs_end_with_the_same_error(llm):
    pytest.importorskip("llguidance", reason="needs the extra: hookline[grammar]")
    word = llm.codec.encode_word("x")
    params = SamplingParams(bad_words=[word], structured_outputs={"regex": "x"}, max_tokens=4)
    [output] = llm.generate("import os", params)
    assert output.finish_reason is FinishReason.ERROR and output.token_ids == []
    assert "sampling.bad_words, sampling.structured_outputs together forbid all" in output.error


def test_other_requests_find_the_prompts_that_are_cached(llm):
    prompt = [7] * 100
    llm.generate([prompt], SamplingParams(max_tokens=1))
    llm.generate([prompt], forbidding())
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1))
    assert output.num_cached_tokens > 0
