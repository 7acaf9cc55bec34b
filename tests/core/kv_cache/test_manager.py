"""Blocks of several groups: what leaves a window is free, what is found is exact, and what is counted fits.

The fake executor reads each group's blocks as far as its window reaches, and fails on any that is not the request's.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.contracts import ALL, FullAttention, ModelSpec, Plan, SlidingWindow
from hookline.core.errors import PlanError, RequestFault
from hookline.core.kv_cache.prefix_index import HOLE
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.scheduling import plan_mixed
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import RandomLoad, drain
from tests.core.engine.test_plan_check import Comparing, Foreseeing
from tests.fuzzing import examples

FULL, W = FullAttention(), SlidingWindow
PAIR = (FULL, W(6))
LAYERS = [(FULL, W(4)), (FULL, W(1), W(7)), (W(5), W(5), FULL, W(5)), (FULL, W(9), W(9), W(3))]


class Mixed:
    def plan(self, view):
        return plan_mixed(view, 0.0)


def engine_of(layers=PAIR, scheduler=None, **options):
    return fake_engine(scheduler or PlainScheduler(), layers=layers, **{"num_blocks": 128, **options})


def add(engine, prompt, max_tokens=4, cache_salt=None):
    options = RequestOptions(cache_salt=cache_salt)
    return engine.add(prompt, SamplingParams(max_tokens=max_tokens, seed=1), options=options)


def held(engine, id_):
    """Blocks of the request in each group, holes left out."""
    return [sum(block != HOLE for block in blocks) for blocks in engine.queue.live[id_].group_blocks]


# ------------------------------------------------------------------------------------------------------------- windows


def test_blocks_behind_a_window_are_given_back_as_a_request_goes_on():
    engine = engine_of(max_num_batched_tokens=8)
    id_ = add(engine, list(range(1, 21)), max_tokens=20)
    found = []
    while engine.has_work and id_ in engine.queue.live:
        engine.step()
        if id_ in engine.queue.live:
            request = engine.queue.live[id_]
            found.append((request.num_computed_tokens, *held(engine, id_)))
    # A window of 6 at position p sees from p - 5 on, in blocks of 4.
    assert found == [(done, -(-done // 4), -(-done // 4) - max(0, done - 5) // 4) for done, _, _ in found]
    assert [done for done, _, _ in found[:4]] == [8, 16, 20, 21]


def test_what_left_a_window_can_be_taken_by_others_and_found_until_then():
    engine = engine_of(num_blocks=20)
    add(engine, list(range(1, 30)))
    drain(engine)
    assert engine.pool.num_free == 20
    add(engine, list(range(1, 30)))
    [output] = drain(engine)
    assert output.num_cached_tokens == 28


def test_a_prompt_longer_than_the_pool_runs_where_its_windows_need_few_blocks():
    engine = engine_of((W(4), W(4)), num_blocks=6, max_num_batched_tokens=4, max_model_len=128)
    assert engine.limits.max_len == 128
    prompt = [1 + index % 40 for index in range(100)]
    id_ = add(engine, prompt)
    engine.step()
    assert engine.queue.live[id_].num_computed_tokens == 4
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert engine.pool.num_free == 6


@pytest.mark.slow
def test_five_windows_of_six_layers_hold_three_times_the_requests_of_full_attention():
    """8,192 tokens each, windows of 1,024, in the same bytes."""
    most = {}
    layers = (*[W(1024)] * 5, FULL)
    for name, own, num_blocks in (("full", (FULL,) * 6, 2 * 513), ("windows", layers, 6 * 2 * 513)):
        engine = fake_engine(
            PlainScheduler(), layers=own, num_blocks=num_blocks, block_size=16, max_num_seqs=32,
            max_num_batched_tokens=2048, max_model_len=8208, prefix_caching=False,
        )  # fmt: skip
        for index in range(9):
            engine.add([1 + (index + place) % 49 for place in range(8192)], SamplingParams(max_tokens=16, seed=index))
        running, num_preemptions = [], 0
        while engine.has_work:
            num_preemptions += sum(output.num_preemptions for output in engine.step())
            running.append(len(engine.queue.running))
        assert num_preemptions == 0
        most[name] = max(running)
    assert most["full"] == 2
    assert most["windows"] >= 3 * most["full"]


# ------------------------------------------------------------------------------------------------------------ prefixes

LENGTH = 12


@settings(max_examples=examples(60))
@given(
    windows=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    num_full=st.integers(0, 1),
    missing=st.sets(st.tuples(st.integers(0, 3), st.integers(0, LENGTH - 1)), max_size=6),
    block_size=st.sampled_from([1, 2, 4]),
)
def test_the_longest_prefix_is_found_that_all_groups_can_go_on_from(windows, num_full, missing, block_size):
    layers = (*[FULL] * num_full, *map(W, windows))
    engine = engine_of(layers, block_size=block_size, max_model_len=64)
    request = engine.queue.live[add(engine, list(range(1, LENGTH * block_size + 2)))]
    cache, groups = engine.cache, engine.cache.windows
    places = {(group, index) for group in range(len(groups)) for index in range(LENGTH)} - missing
    for group, index in places:
        [block] = engine.pool.allocate(1)
        tokens, hash_ = cache.block_tokens(request, index), cache.block_hash(request, index)
        engine.pool.cache(block, cache.key(group, hash_), tokens, request.prefix_root)
        engine.pool.release([block])

    def fits(length):
        needed = {
            (group, index)
            for group, window in enumerate(groups)
            for index in range(length)
            if window is None or (index + 1) * block_size > length * block_size - window + 1
        }
        return needed <= places

    best = max(length for length in range(LENGTH + 1) if fits(length))
    assert cache.num_matched(request) == best
    for group, blocks in enumerate(cache.match_groups(request)):
        assert len(blocks) == best
        for index, block in enumerate(blocks):
            window = groups[group]
            is_seen = window is None or (index + 1) * block_size > best * block_size - window + 1
            assert (block != HOLE) == is_seen


def test_a_prefix_is_found_although_the_windows_before_it_were_taken_by_others():
    engine = engine_of((FULL, W(4)), num_blocks=64)
    prompt = list(range(1, 42))
    add(engine, prompt)
    drain(engine)
    request = engine.queue.live[add(engine, prompt)]
    early = engine.cache.match_groups(request)[1][:8]
    assert early == [HOLE] * 8  # blocks that the hit does not need
    taken = [engine.cache._find(request, 1, index, request.prefix_root) for index in range(8)]
    engine.pool.forget(taken)
    assert engine.cache.num_matched(request) == 10
    [output] = drain(engine)
    assert output.num_cached_tokens == 40
    assert output.token_ids == completion(1, prompt, 4, 50)


def test_other_tokens_before_a_window_are_another_prefix():
    engine = engine_of((W(4), W(4)), num_blocks=64)
    add(engine, [1, 2, 3, 4, *range(10, 31)])
    drain(engine)
    request = engine.queue.live[add(engine, [1, 2, 3, 9, *range(10, 31)])]
    assert engine.cache.num_matched(request) == 0


@pytest.mark.parametrize(("salts", "num_cached"), [(("a", "b"), 0), (("a", None), 0), (("a", "a"), 20)])
def test_a_cache_salt_separates_in_all_groups(salts, num_cached):
    engine = engine_of(num_blocks=64)
    prompt = list(range(1, 22))
    add(engine, prompt, cache_salt=salts[0])
    drain(engine)
    add(engine, prompt, cache_salt=salts[1])
    [output] = drain(engine)
    assert output.num_cached_tokens == num_cached


def test_requests_of_one_step_share_what_the_first_of_them_computes():
    engine = engine_of((FULL, W(6), W(3)), max_num_batched_tokens=64, num_blocks=128)
    prompt = list(range(1, 30))
    ids = [add(engine, [*prompt, last]) for last in (40, 41, 42)]
    engine.step()
    assert [engine.queue.live[id_].num_cached_tokens for id_ in ids] == [0, 28, 28]
    outputs = {output.request_id: output.token_ids for output in drain(engine)}
    assert [outputs[id_] for id_ in ids] == [completion(1, [*prompt, last], 4, 50) for last in (40, 41, 42)]


# -------------------------------------------------------------------------------------------- loads, ledger, lost steps


@pytest.mark.parametrize("seed", [*range(24), 117])  # of 117: a block cached in some groups only
def test_a_random_load_gets_its_tokens_and_the_pool_has_what_the_ledger_said(seed):
    rng = random.Random(seed)
    policy, layers = (Foreseeing(rng) if seed % 2 else Mixed()), LAYERS[seed // 2 % len(LAYERS)]
    sizes = {"num_blocks": rng.randint(30, 110), "max_model_len": rng.choice([32, 64])}
    load = RandomLoad(policy, rng, layers=layers, **sizes)
    engine = policy.engine = load.engine
    if seed % 2:
        executor = engine.executor = Comparing(engine)
    load.run(abort_chance=0.02)
    assert len(load.ended) == 12
    assert not seed % 2 or executor.num_compared >= 3


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_many_random_loads_get_their_tokens(first):
    for seed in range(first, first + 100):
        test_a_random_load_gets_its_tokens_and_the_pool_has_what_the_ledger_said(seed)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("number", range(1, 7))
def test_what_a_lost_step_was_to_compute_is_not_found_even_behind_a_window(number, overlap):
    engine = engine_of((FULL, W(3)), max_num_batched_tokens=12, overlap=overlap, num_blocks=64)
    prompt, count, launch = list(range(1, 26)), 0, engine.executor.launch

    def launch_or_fail(step):
        nonlocal count
        count += 1
        if count == number:
            raise RequestFault("a processor fails", rows=[99])
        return launch(step)

    engine.executor.launch = launch_or_fail
    ids = [add(engine, prompt, max_tokens=5), add(engine, [*prompt[:20], 9], max_tokens=5)]
    outputs = {output.request_id: output.token_ids for output in drain(engine)}
    assert count > number
    assert [outputs[id_] for id_ in ids] == [
        completion(1, prompt, 5, 50),
        completion(1, [*prompt[:20], 9], 5, 50),
    ]
    assert engine.pool.num_free == 64


class Scripted:
    def __init__(self, *plans):
        self.plans = list(plans)

    def plan(self, view):
        return self.plans.pop(0)


def test_decodes_that_lack_blocks_in_some_group_are_refused():
    plans = Plan(prefill=[(0, 8), (1, 8)]), Plan(decode=ALL)
    engine = engine_of((FULL, W(9)), Scripted(*plans), num_blocks=11)
    for _ in range(2):
        add(engine, list(range(1, 9)), cache_salt=str(len(engine.queue.live)))
    engine.step()
    assert engine.pool.num_free == 3
    with pytest.raises(PlanError, match="needs 2 blocks for 1 tokens of request 1, and 1 of 11 are free"):
        engine.step()


def test_full_attention_everywhere_is_one_group():
    engine = fake_engine(PlainScheduler())
    request = engine.queue.live[add(engine, list(range(1, 10)))]
    engine.step()
    assert request.group_blocks == [request.blocks]
    assert len(request.blocks) == 3
    assert engine.limits.plan.max_blocks_per_token == 1
    assert ModelSpec(2, 1, 1, 8, 8, 8, 64).cache_layers == (FULL, FULL)
