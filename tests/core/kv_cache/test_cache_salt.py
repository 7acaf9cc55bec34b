"""A cache salt separates: no block of one request is found by a request with another salt, or with none."""

import itertools
import random

import pytest

from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import drain, look

PROMPT = list(range(1, 22))
"""Five full blocks of four tokens, and one token."""


class Noting(PlainScheduler):
    """Keeps, for each waiting request, the tokens it would have to compute."""

    def __init__(self):
        self.uncomputed = {}

    def plan(self, view):
        for request in view.waiting:
            self.uncomputed.setdefault(request.id, view.budget.num_uncomputed_tokens(request))
        return super().plan(view)


def engine_of(**options):
    return fake_engine(Noting(), **{"num_blocks": 64, "max_num_batched_tokens": 512, **options})


def add(engine, salt, prompt=PROMPT):
    return engine.add(prompt, SamplingParams(max_tokens=4, seed=1), options=RequestOptions(cache_salt=salt))


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, "a")], ids=str)
def test_nothing_is_found_under_another_salt(salts):
    engine = engine_of()
    add(engine, salts[0])
    drain(engine)
    second = add(engine, salts[1])
    [output] = drain(engine)
    assert output.num_cached_tokens == 0
    assert engine.scheduler.uncomputed[second] == len(PROMPT)


@pytest.mark.parametrize("salt", ["a", None])
def test_equal_salts_find_each_others_blocks(salt):
    engine = engine_of()
    add(engine, salt)
    [first] = drain(engine)
    second = add(engine, salt)
    [output] = drain(engine)
    assert (first.num_cached_tokens, output.num_cached_tokens) == (0, 20)
    assert engine.scheduler.uncomputed[second] == 1
    assert output.token_ids == first.token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_running_side_by_side_shares_no_block_and_changes_nobodys_work(overlap):
    together, alone = engine_of(overlap=overlap), engine_of(overlap=overlap)
    ids = [add(together, salt) for salt in ("a", "b", None)]
    add(alone, "a")
    together.step()
    alone.step()
    blocks = [set(together.queue.live[id_].blocks) for id_ in ids]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(blocks, 2))
    assert [together.scheduler.uncomputed[id_] for id_ in ids] == [len(PROMPT)] * 3
    work = [engine.queue.live[0].num_computed_tokens for engine in (together, alone)]
    assert work[0] == work[1]
    assert {output.num_cached_tokens for output in drain(together)} == {0}


def test_equal_salts_share_within_one_step():
    engine = engine_of()
    ids = [add(engine, "a"), add(engine, "a")]
    engine.step()
    first, second = (engine.queue.live[id_].blocks for id_ in ids)
    assert first[:5] == second[:5]


def test_a_plans_ledger_foresees_a_hit_under_the_same_salt_alone():
    engine = engine_of()
    ids = [add(engine, salt) for salt in ("a", "b", "a")]
    view = look(engine)
    first, other, same = (engine.queue.live[id_].view for id_ in ids)
    assert view.budget.take(first, len(PROMPT))
    assert (view.budget.num_cached_tokens(other), view.budget.num_cached_tokens(same)) == (0, 20)


def test_a_preempted_request_finds_its_own_salted_blocks_again():
    engine = engine_of()
    id_ = add(engine, "a")
    engine.step()
    request = engine.queue.live[id_]
    engine.dispatcher.preempt([request])
    assert look(engine).budget.num_cached_tokens(request.view) == 20


def test_decodes_of_different_salts_are_no_shared_prefix_group(monkeypatch):
    monkeypatch.setattr("hookline.core.kv_cache.shared_prefix.MIN_SAVED_TOKENS", 1)
    engine = engine_of(shares_prefixes=True)
    for salt in ("a", "b", "a", "c"):
        add(engine, salt)
    engine.step()
    engine.step()
    assert sorted(engine.executor.steps[1].shared_rows.tolist()) == [0, 2]


@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_with_preemptions_never_shares_a_block_across_salts_and_gets_its_tokens(seed):
    rng = random.Random(seed)
    engine = fake_engine(PlainScheduler(), num_blocks=24, max_num_seqs=6, max_model_len=64, overlap=seed % 2 == 1)
    wanted, cached = {}, 0
    for number in range(40):
        prompt = [*PROMPT[: rng.randint(4, 21)], rng.randrange(50)]
        params = SamplingParams(max_tokens=rng.randint(1, 20), seed=number)
        id_ = engine.add(prompt, params, options=RequestOptions(cache_salt=rng.choice([None, "a", "b"])))
        wanted[id_] = completion(number, prompt, params.max_tokens, 50)
    for output in drain(engine):  # which looks for shared blocks after each step
        assert output.token_ids == wanted[output.request_id]
        cached += output.num_cached_tokens
    assert cached > 0
