"""A step that breaks off ends no more requests than it must; the others get the tokens they would have got anyway."""

import pytest

from hookline.core.errors import RequestFault, StepCapacityError, StepFault
from hookline.core.outputs import FinishReason
from hookline.core.requests.step_extensions import Prepared
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9], [7, 8], [6] * 9)
FIRST = 1
"""Bit of a logits processor."""


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def engine(request):
    return fake_engine(PlainScheduler(), overlap=request.param, max_num_batched_tokens=8)


def add(engine, prompts=PROMPTS, max_tokens=9):
    return [engine.add(prompt, SamplingParams(max_tokens=max_tokens, seed=1)) for prompt in prompts]


def fails(engine, number, error):
    """Have the launch of this step fail, after the ranks have computed all or nothing of it."""
    launch, count = engine.executor.launch, 0

    def launch_or_fail(step):
        nonlocal count
        count += 1
        if count == number:
            raise error(step) if callable(error) else error
        return launch(step)

    engine.executor.launch = launch_or_fail


def check_served(outputs, ids, prompts=PROMPTS, max_tokens=9):
    by_id = {output.request_id: output for output in outputs}
    for id_, prompt in zip(ids, prompts, strict=True):
        assert by_id[id_].token_ids == completion(1, prompt, max_tokens, 50), f"request {id_} got other tokens"
        assert by_id[id_].finish_reason is FinishReason.LENGTH


def steps(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check_engine(engine)
    return outputs


@pytest.mark.parametrize("number", range(1, 9))
def test_what_fails_for_one_request_ends_it_alone_and_the_others_lose_no_token(engine, number):
    ids, rows = add(engine), []

    def fault(step):
        rows.extend([*step.decode_rows.tolist(), *step.chunk_rows.tolist()][:1])
        broken.extend(id_ for id_, one in engine.queue.running.items() if one.row == rows[0])
        return RequestFault("processor 'it' fails", rows=rows)

    broken = []
    fails(engine, number, fault)
    outputs = steps(engine)
    (ended,) = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert [ended.request_id] == broken and ended.error == f"request {broken[0]}: processor 'it' fails"
    prompt = PROMPTS[ids.index(ended.request_id)]
    assert ended.token_ids == completion(1, prompt, 9, 50)[: len(ended.token_ids)]
    others = [(id_, prompt) for id_, prompt in zip(ids, PROMPTS, strict=True) if id_ not in broken]
    check_served(outputs, [id_ for id_, _ in others], [prompt for _, prompt in others])


def test_a_processor_that_fails_ends_all_that_use_it_and_no_other(engine):
    ids = add(engine)
    for id_ in ids[1:3]:
        engine.queue.live[id_].prepared = Prepared(num_draws=((FIRST, None),), bits=FIRST)
    fails(engine, 5, RequestFault("processor 'it' fails", extensions=FIRST))
    outputs = steps(engine)
    assert sorted(output.request_id for output in outputs if output.error) == ids[1:3]
    check_served([output for output in outputs if not output.error], [ids[0], ids[3]], [PROMPTS[0], PROMPTS[3]])


@pytest.mark.parametrize("kind", [StepFault, StepCapacityError])
def test_a_step_that_fails_ends_its_requests_and_leaves_those_that_wait(engine, kind):
    ids = add(engine, [*PROMPTS, *PROMPTS, *PROMPTS])
    fails(engine, 2, kind("it fails"))
    with pytest.raises(kind, match=r"it fails\. The requests of this step have ended, the engine goes on") as caught:
        for _ in range(3):
            engine.step()
    check_engine(engine)
    assert caught.value.ended and caught.value.ended < set(ids)
    outputs = steps(engine)
    ended = {output.request_id for output in outputs if output.finish_reason is FinishReason.ERROR}
    assert ended == caught.value.ended
    assert all("the engine lost a step: it fails" in output.error for output in outputs if output.error)
    others = [(id_, prompt) for id_, prompt in zip(ids, PROMPTS * 3, strict=True) if id_ not in ended]
    check_served(outputs, [id_ for id_, _ in others], [prompt for _, prompt in others])


def test_blocks_that_a_lost_step_was_to_fill_are_not_found_and_earlier_ones_are(engine):
    prompt = list(range(1, 14))
    engine.add(prompt, SamplingParams(max_tokens=9, seed=1))
    fails(engine, 2, lambda step: RequestFault("it fails", rows=[0]))
    assert [output.finish_reason for output in steps(engine)] == [FinishReason.ERROR]
    engine.add(prompt, SamplingParams(max_tokens=9, seed=1))
    (output,) = steps(engine)
    assert output.num_cached_tokens == 8 and output.token_ids == completion(1, prompt, 9, 50)


def test_an_executor_that_cannot_go_on_ends_all(engine):
    ids = add(engine, [*PROMPTS, *PROMPTS, *PROMPTS])
    error = StepFault("the device is gone")
    error.ends_engine = True
    fails(engine, 1, error)
    with pytest.raises(StepFault):
        engine.step()
    assert not engine.queue.live
    assert {output.finish_reason for output in engine.step()} == {FinishReason.ERROR} and len(ids) == 12
