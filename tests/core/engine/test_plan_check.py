"""The ledger foresees what the pool will be: compared while an engine carries out what was counted on it."""

import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from hookline.core.contracts import FullAttention, Plan, SlidingWindow
from hookline.core.sampling_params import SamplingParams
from hookline.core.scheduling import plan_mixed
from hookline.core.testing.fakes import FakeExecutor, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import RandomLoad, look


class Foreseeing:
    """Plans at random, counted on the ledger in the order in which they are carried out; sensible ones in between."""

    def __init__(self, rng):
        self.rng, self.foreseen = rng, None

    def plan(self, view):
        self.foreseen = None
        plan = self.at_random(view) if self.rng.random() < 0.5 else Plan()
        if plan.prefill or plan.decode:
            self.foreseen = view.budget.num_free, self.computed
            return plan
        return plan_mixed(look(self.engine), 0.0)

    def at_random(self, view):
        budget, rng, running = view.budget, self.rng, list(view.running)
        preempt = [running.pop() for _ in range(rng.choice([0, 0, 0, 1, 2])) if running]
        for request in preempt:
            budget.give_back(request)
        decode = [one.id for one in running if not one.is_prefilling and rng.random() < 0.9 and budget.take(one, 1)]
        self.computed, prefill, tokens = {}, [], view.limits.max_num_batched_tokens - len(decode)
        seats = view.limits.max_num_seqs - len(running)
        waiting = rng.sample(view.waiting[:], min(seats, len(view.waiting)))
        for request in [*[one for one in running if one.is_prefilling], *waiting]:
            left = budget.num_uncomputed_tokens(request)
            count = min(tokens, rng.choice([left, rng.randint(1, left)]))
            cached = request.num_tokens - left
            if count and budget.take(request, count):
                self.computed[request.id] = cached + count
                prefill.append((request.id, count))
                tokens -= count
        return Plan(prefill=prefill, decode=decode, preempt=[one.id for one in preempt])


class Comparing(FakeExecutor):
    """Looks at the pool when a plan has been carried out and nothing has ended yet.

    The ledger says how many blocks are free; with windows, more may be.
    """

    num_compared = 0

    def __init__(self, engine):
        windows = engine.cache.windows
        super().__init__(engine.limits.plan, engine.limits.vocab_size, windows)
        self.engine, self.has_windows = engine, windows != (None,)

    def launch(self, step):
        foreseen = self.engine.scheduler.foreseen
        if foreseen is not None:
            num_free, computed = foreseen
            num_more = self.engine.pool.num_free - num_free
            assert num_more >= 0 if self.has_windows else num_more == 0, "the ledger said that more is free"
            assert {id_: self.engine.queue.live[id_].num_computed_tokens for id_ in computed} == computed
            self.num_compared += 1
        return super().launch(step)


@pytest.mark.parametrize("seed", range(30))
def test_the_pool_is_what_the_ledger_said_it_would_be(seed):
    rng = random.Random(seed)
    policy = Foreseeing(rng)
    load = RandomLoad(policy, rng)
    engine = policy.engine = load.engine
    executor = engine.executor = Comparing(engine)
    load.run(abort_chance=0.02)
    assert executor.num_compared >= 3


def num_calls(function):
    """How many functions of Python are called in a function; a generator's next value counts as a call."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


NUM_SHARING = 8
"""Prompts that share a prefix in one step."""


def calls_of_a_step(layers, num_blocks):
    """Calls of a step that admits prompts which share so many blocks."""
    engine = fake_engine(PlainScheduler(), layers=layers, num_blocks=512, max_model_len=512, max_num_batched_tokens=512)
    prefix = [1 + index % 40 for index in range(num_blocks * 4)]
    for last in range(NUM_SHARING):
        engine.add([*prefix, 41 + last], SamplingParams(max_tokens=2))
    calls = num_calls(engine.step)
    found = [request.num_cached_tokens for request in engine.queue.live.values()]
    assert found[1:] == [len(prefix)] * (NUM_SHARING - 1)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(), (FullAttention(), SlidingWindow(6))])
def test_prompts_that_share_a_long_prefix_in_one_step_cost_few_calls_for_each_block_of_it(layers):
    """Counted in a process of its own: Python 3.11 goes round for ever at the first instruction of a profiled function
    if a thread of the process was once sent an exception, as threads of other tests are (core/frontend/step_guard.py).
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        many, few = (child.submit(calls_of_a_step, layers, num_blocks).result() for num_blocks in (60, 20))
    assert (many - few) / 40 / NUM_SHARING < 10
