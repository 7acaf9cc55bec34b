"""Pooled requests in an engine without a model: every way they can end, and what they leave behind: nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from hookline.core.errors import CapacityError, ConfigError, RequestError, RequestFault, StepFault
from hookline.core.outputs import FinishReason
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_options import RequestOptions
from hookline.core.requests.pooling import Poolers
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.fakes.poolers import fake_poolers, pooled_numbers
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.worker.results.pooling import RankPooler

LAST, ALL = PoolingParams("last"), PoolingParams("all")
GREEDY = SamplingParams(max_tokens=6, seed=1)


def engine_with(**options: Any) -> Any:
    engine = fake_engine(PlainScheduler(), **options)
    engine.state.limits = replace(engine.limits, poolers=fake_poolers())
    return engine


def finished(engine: Any) -> dict[int, Any]:
    found = {}
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step()}
        check_engine(engine)
    return found


def assert_empty(engine: Any) -> None:
    assert engine.pool.num_free == engine.pool.num_blocks and not engine.queue.live
    assert len(engine.dispatcher.free_rows) == engine.limits.plan.max_num_seqs and engine.queue.table.num_reading == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 13])
def test_vectors_and_tokens_of_a_crowd_are_those_of_each_alone(overlap: bool, num_blocks: int) -> None:
    rng = random.Random(0)
    engine = engine_with(overlap=overlap, num_blocks=num_blocks, max_num_batched_tokens=16)
    prompts = [[rng.randrange(1, 50) for _ in range(rng.randrange(1, 45))] for _ in range(60)]
    prompts += [prompt[:20] for prompt in prompts[:20]]
    wishes = [rng.choice([LAST, ALL, None]) for _ in prompts]
    ids = [engine.add(prompt, GREEDY, pooling=wish) for prompt, wish in zip(prompts, wishes, strict=True)]
    outputs = finished(engine)
    for id_, prompt, wish in zip(ids, prompts, wishes, strict=True):
        output = outputs[id_]
        if wish is None:
            assert output.token_ids == completion(1, prompt, 6, 50) and output.vector is None
        else:
            assert output.finish_reason is FinishReason.STOP and output.token_ids == []
            assert output.vector.tolist() == pooled_numbers(prompt) and output.timings.first_token_s is None
    assert_empty(engine)


def test_a_prompt_may_fill_the_whole_length_and_no_more() -> None:
    engine = engine_with(max_model_len=16, max_num_batched_tokens=16)
    id_ = engine.add([3] * 16, GREEDY, pooling=LAST)
    assert finished(engine)[id_].vector.tolist() == pooled_numbers([3] * 16)
    with pytest.raises(RequestError, match="the prompt has 17 tokens; a prompt may have at most 16 tokens"):
        engine.add([3] * 17, GREEDY, pooling=LAST)


def test_a_cached_prefix_is_used_unless_the_pooler_reads_all_tokens() -> None:
    engine = engine_with()
    prompt = list(range(1, 21))
    first = engine.add(prompt, GREEDY, pooling=LAST)
    assert finished(engine)[first].num_cached_tokens == 0
    again, whole = engine.add(prompt, GREEDY, pooling=LAST), engine.add(prompt, GREEDY, pooling=ALL)
    outputs = finished(engine)
    assert (outputs[again].num_cached_tokens, outputs[whole].num_cached_tokens) == (16, 0)
    assert outputs[again].vector.tolist() == outputs[whole].vector.tolist() == pooled_numbers(prompt)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_request_is_gone_at_any_time_and_disturbs_nobody(overlap: bool) -> None:
    for num_steps in range(5):
        engine = engine_with(overlap=overlap, max_num_batched_tokens=8)
        ids = [engine.add([7] * 20, GREEDY, pooling=ALL), engine.add([8, 9], GREEDY, pooling=LAST)]
        for _ in range(num_steps):
            engine.step()
        engine.abort(ids[:1])
        outputs = finished(engine)
        assert ids[0] not in outputs or outputs[ids[0]].vector is not None
        assert_empty(engine)


def test_a_time_limit_ends_one_that_waits() -> None:
    engine = engine_with(max_num_seqs=1)
    now = [0.0]
    engine.clock = lambda: now[0]
    engine.add([1] * 10, GREEDY)
    late = engine.add([2] * 10, GREEDY, pooling=LAST, options=RequestOptions(timeout_s=1.0))
    engine.step()
    now[0] = 2.0
    output = finished(engine)[late]
    assert output.finish_reason is FinishReason.ABORT and "timeout_s=1.0" in output.error
    assert_empty(engine)


def test_a_lost_step_ends_its_requests_and_a_fault_only_those_it_names() -> None:
    for fault, survivors in ((StepFault("broken"), 0), (RequestFault("broken", rows=[0]), 1)):
        engine = engine_with()
        launch, faults = engine.executor.launch, [fault]
        engine.executor.launch = lambda step, launch=launch, faults=faults: (
            launch(step) if not faults else (_ for _ in ()).throw(faults.pop())
        )
        ids = [engine.add([4, 5, 6], GREEDY, pooling=ALL), engine.add([7, 8], GREEDY, pooling=LAST)]
        try:
            ended = {output.request_id: output for output in engine.step()}
        except StepFault:
            ended = {output.request_id: output for output in engine.step()}
        outputs = ended | finished(engine)
        served = [id_ for id_ in ids if outputs[id_].vector is not None]
        assert len(served) == survivors and "broken" in outputs[ids[0]].error
        assert_empty(engine)


def test_a_vector_with_nan_is_an_error_of_its_request_alone() -> None:
    engine = engine_with()
    collect = engine.executor.collect

    def collected(handle):
        result = collect(handle)
        for vectors_PF in result.apart.values():
            vectors_PF[0] = np.nan
        return result

    engine.executor.collect = collected
    ids = [engine.add([4, 5], GREEDY, pooling=ALL), engine.add([6], GREEDY, pooling=ALL)]
    outputs = finished(engine)
    assert "NaN or infinity" in outputs[ids[0]].error and outputs[ids[0]].finish_reason is FinishReason.ERROR
    assert outputs[ids[1]].vector.tolist() == pooled_numbers([6])


def test_a_step_without_pooled_requests_says_nothing_of_pooling() -> None:
    engine = engine_with()
    engine.add([1, 2, 3], GREEDY)
    finished(engine)
    assert all(len(step.reads) == 0 for step in engine.executor.steps)


def test_an_engine_without_poolers_refuses_in_one_line() -> None:
    engine = fake_engine(PlainScheduler())
    with pytest.raises(RequestError, match="there is no pooler whose task is embed"):
        engine.add([1], GREEDY, pooling=PoolingParams())
    engine.state.limits = replace(engine.limits, poolers=Poolers(fake_poolers().entries, hidden_size=3))
    for wish, message in (
        (PoolingParams("lst"), "there is no pooler 'lst'"),
        (PoolingParams(dimensions=4), "pooling.dimensions=4 is more than the 3 numbers"),
        ("last", "pooling='last' must be PoolingParams"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add([1], GREEDY, pooling=wish)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooler": ""}, "pooling.pooler=''"),
        ({"pooler": 3}, "pooling.pooler=3"),
        ({"normalize": 1.0}, "pooling.normalize=1.0"),
        ({"dimensions": 0}, "pooling.dimensions=0"),
        ({"dimensions": True}, "pooling.dimensions=True"),
        ({"dimensions": float("nan")}, "pooling.dimensions=nan"),
        ({"dimensions": 2**63}, "must be a whole number from 1"),
        ({"task": "rank"}, "pooling.task='rank' must be one of embed, classify, score"),
    ],
)
def test_impossible_wishes_are_refused_when_they_are_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PoolingParams(**fields)


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
def test_a_pooler_that_leaves_by_whatever_names_itself_and_the_rows(error: type[BaseException]) -> None:
    pooler = RankPooler("pooler 'odd'", Mock(), Mock(), 4, torch.device("cpu"))

    def leave(group: Any, hidden_TD: Any) -> Any:
        raise error("boom")

    pooler._run = leave  # type: ignore[method-assign]
    group = SimpleNamespace(tokens=[0, 1], rows=np.array([3, 1]))
    with pytest.raises(RequestFault, match=rf"pooler 'odd' fails: {error.__name__}: boom \(") as caught:
        pooler.run(group, torch.zeros(2, 4))  # type: ignore[arg-type]
    assert caught.value.rows == {1, 3}


@pytest.mark.parametrize(("error", "num_made"), [(ConfigError("not one token"), 1), (CapacityError("full"), 3)])
def test_a_pooler_that_refuses_the_checkpoint_is_not_made_again_for_each_step(error: Exception, num_made: int) -> None:
    made = []

    def make() -> Any:
        made.append(1)
        raise error

    pooler = RankPooler("pooler 'odd'", make, Mock(), 4, torch.device("cpu"))
    numbers = {name: np.array([0]) for name in ("rows", "starts", "lens", "flags", "sizes")}
    for _ in range(3):
        with pytest.raises(RequestFault, match=rf"pooler 'odd' (refuses|fails( in __init__)?): {error}"):
            pooler.run(SimpleNamespace(tokens=[0], **numbers), torch.zeros(1, 4))  # type: ignore[arg-type]
    assert len(made) == num_made
