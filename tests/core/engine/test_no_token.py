"""A draw that brings no token, as of logits that are NaN, ends its request with an error, and the others go on."""

import pytest

from hookline.core.contracts import NO_TOKEN
from hookline.core.outputs import FinishReason
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9], [7, 8])
NAMES = {
    "model": "model 'm' of plugin 'p' (p 1)",
    "sampler": "sampler 's' of plugin 'q' (q 1)",
    "kernels": "kernels 'k'",
}


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def engine(request):
    return fake_engine(PlainScheduler(), overlap=request.param, names=NAMES)


def draw_nothing(engine, number, token_id=NO_TOKEN):
    """Have the first draw of this step bring this in place of a token."""
    collect, count = engine.executor.collect, 0

    def collected(handle):
        nonlocal count
        count += 1
        result = collect(handle)
        if count == number:
            result.tokens[0] = token_id
        return result

    engine.executor.collect = collected


def served(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check_engine(engine)
    return {output.request_id: output for output in outputs}


@pytest.mark.parametrize("number", [1, 2, 5])
def test_its_request_ends_alone_with_the_model_and_the_sampler_named(engine, number):
    draw_nothing(engine, number)
    for prompt in PROMPTS:
        engine.add(prompt, SamplingParams(max_tokens=9, seed=1))
    outputs = served(engine)
    ended, *others = (outputs[id_] for id_ in range(3))
    assert ended.finish_reason is FinishReason.ERROR and ended.is_fault
    assert ended.token_ids == completion(1, PROMPTS[0], 9, 50)[: number - 1]
    assert ended.error == (
        "request 0: model 'm' of plugin 'p' (p 1) fails in logits: they are NaN, so that sampler 's' of plugin 'q' "
        "(q 1) draws no token; kernels 'k' may be at fault"
    )
    for output, prompt in zip(others, PROMPTS[1:], strict=True):
        assert output.token_ids == completion(1, prompt, 9, 50)


def test_its_blocks_are_found_by_no_later_request(engine):
    draw_nothing(engine, 2)
    engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=9, seed=1))
    assert served(engine)[0].finish_reason is FinishReason.ERROR
    engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=2, seed=1))
    assert served(engine)[1].num_cached_tokens == 0


def test_a_negative_token_that_is_not_that_one_is_the_sampler_s_fault(engine):
    draw_nothing(engine, 3, -5)
    engine.add([1, 2], SamplingParams(max_tokens=9, seed=1))
    assert served(engine)[0].error == (
        "request 0: sampler 's' of plugin 'q' (q 1) breaks its contract in sample: it drew token id -5, which is "
        "outside the vocabulary"
    )
