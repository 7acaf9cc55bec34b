"""The shipped policies: the conformance suite, and what each promises beyond it."""

import random

import pytest

from hookline.core.config.schema import build
from hookline.core.contracts import ALL, Joining
from hookline.core.errors import ConfigError
from hookline.core.outputs import FinishReason
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import completion, fake_engine
from hookline.core.testing.scheduler_suite import SchedulerSuite, drain, look
from hookline.plugins.schedulers import (
    ChunkedConfig,
    DeadlineConfig,
    FairShareConfig,
    LongestFirstConfig,
    PrefillFirstConfig,
)
from hookline.plugins.schedulers.chunked import Chunked
from hookline.plugins.schedulers.deadline import Deadline
from hookline.plugins.schedulers.fair_share import FairShare
from hookline.plugins.schedulers.longest_first import LongestFirst
from hookline.plugins.schedulers.prefill_first import PrefillFirst

BOTH = [lambda: PrefillFirst(PrefillFirstConfig()), lambda: Chunked(ChunkedConfig())]
WITH_MEMORY = [lambda: FairShare(FairShareConfig()), lambda: Deadline(DeadlineConfig())]
ALL_OF_THEM = [
    *BOTH,
    *[lambda pace=pace: LongestFirst(LongestFirstConfig(pace=pace)) for pace in (False, True)],
    *WITH_MEMORY,
]


@pytest.mark.parametrize(
    "make", [lambda: PrefillFirst(PrefillFirstConfig()), lambda: FairShare(FairShareConfig())], ids=["prefill", "fair"]
)
@pytest.mark.parametrize(("joining", "joins"), [(Joining(8, 2, 12), True), (Joining(), False)], ids=["joins", "not"])
def test_policies_that_put_prompts_first_let_decodes_join_them_where_it_pays(make, joining, joins):
    engine, mixed = fake_engine(make(), num_blocks=200, joining=joining), []
    for index in range(20):
        engine.add([1 + index] * (3 + index % 7), SamplingParams(max_tokens=3 + index % 5, seed=index))
        engine.step()
        mixed.append(engine.last_stats.num_prefill_tokens > 0 and engine.last_stats.num_decode_tokens > 0)
    assert (sum(mixed) > 5) is joins
    assert joins or not any(mixed)
    drain(engine)


class TestPrefillFirst(SchedulerSuite):
    max_gap_steps = 16

    def make(self):
        return PrefillFirst(PrefillFirstConfig())


class TestPrefillFirstWithAlternateDecodes(SchedulerSuite):
    max_gap_steps = 1

    def make(self):
        return PrefillFirst(PrefillFirstConfig(max_prompt_steps=1))


class TestChunked(SchedulerSuite):
    max_gap_steps = 0

    def make(self):
        return Chunked(ChunkedConfig())


class TestLongestFirst(SchedulerSuite):
    max_gap_steps = 0

    def make(self):
        return LongestFirst(LongestFirstConfig())


class TestPacedLongestFirst(SchedulerSuite):
    max_gap_steps = 0

    def make(self):
        return LongestFirst(LongestFirstConfig(pace=True))


class TestFairShare(SchedulerSuite):
    max_gap_steps = 16

    def make(self):
        return FairShare(FairShareConfig(weights={"a": 3.0}))


class TestDeadline(SchedulerSuite):
    max_gap_steps = 16

    def make(self):
        return Deadline(DeadlineConfig(default_deadline_s=0.01))


def params(max_tokens=4, **options):
    return SamplingParams(max_tokens=max_tokens, seed=1, **options)


def test_prefill_first_computes_waiting_prompts_before_it_decodes():
    engine = fake_engine(PrefillFirst(PrefillFirstConfig()))
    engine.add([1, 2, 3], params())
    engine.step()
    engine.add([4, 5, 6], params())
    assert list(engine.scheduler.plan(look(engine)).prefill) == [(1, 3)]
    engine.step()
    assert engine.scheduler.plan(look(engine)).decode is ALL


def kinds_of_steps(engine, num_steps):
    """'p' for each step that computes prompts only, 'd' for each that decodes; a prompt arrives before each."""
    kinds = ""
    for index in range(num_steps):
        engine.add([index % 50, 3], params(max_tokens=1))
        engine.step()
        kinds += "d" if engine.last_stats.num_decode_tokens else "p"
    return kinds


@pytest.mark.parametrize("max_prompt_steps", [1, 5, 16])
def test_prefill_first_decodes_once_after_so_many_steps_of_prompts_in_a_row(max_prompt_steps):
    engine = fake_engine(PrefillFirst(PrefillFirstConfig(max_prompt_steps=max_prompt_steps)))
    engine.add([1, 2, 3], params(max_tokens=50))
    assert kinds_of_steps(engine, 60) == ("p" + ("p" * max_prompt_steps + "d") * 60)[:60]


def test_steps_of_prompts_while_nobody_can_decode_do_not_count():
    engine = fake_engine(PrefillFirst(PrefillFirstConfig(max_prompt_steps=5)), prefix_caching=False)
    assert kinds_of_steps(engine, 20) == "p" * 20
    engine.add([1, 2, 3], params(max_tokens=50))
    assert kinds_of_steps(engine, 7) == "ppppppd"


def test_a_burst_of_512_prompts_of_512_tokens_is_computed_without_a_pause():
    engine = fake_engine(
        PrefillFirst(PrefillFirstConfig()), num_blocks=40_000, block_size=16, max_num_seqs=512,
        max_num_batched_tokens=16_384, max_model_len=1024, vocab_size=1000, prefix_caching=False,
    )  # fmt: skip
    for index in range(512):
        engine.add([index] * 512, params(max_tokens=2))
    kinds = []
    while engine.has_work:
        engine.step()
        kinds.append((engine.last_stats.num_prefill_tokens, engine.last_stats.num_decode_tokens))
    assert kinds == [(16_384, 0)] * 16 + [(0, 512)]


@pytest.mark.parametrize("value", [0, -1])
def test_steps_of_prompts_without_an_end_cannot_be_configured(value):
    with pytest.raises(ConfigError, match=rf"scheduler.max_prompt_steps={value} must be at least 1"):
        build(PrefillFirstConfig, {"max_prompt_steps": value}, "scheduler")


def test_chunked_decodes_and_computes_prompts_in_one_step():
    engine = fake_engine(Chunked(ChunkedConfig()), max_num_batched_tokens=8)
    engine.add([1, 2, 3], params())
    engine.step()
    engine.add(list(range(1, 21)), params())
    plan = engine.scheduler.plan(look(engine))
    assert plan.decode is ALL
    assert list(plan.prefill) == [(1, 7)]


@pytest.mark.parametrize("make", ALL_OF_THEM)
def test_max_num_seqs_counts_running_requests(make):
    engine = fake_engine(make(), max_num_seqs=4)
    for index in range(12):
        engine.add([index + 1] * 3, params(max_tokens=6))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.queue.running))
    assert most == 4


@pytest.mark.parametrize("make", BOTH)
def test_requests_are_admitted_first_come_first_served(make):
    engine = fake_engine(make(), max_num_seqs=1)
    ids = [engine.add([index + 1] * 3, params()) for index in range(5)]
    assert [output.request_id for output in drain(engine)] == ids


@pytest.mark.parametrize("make", ALL_OF_THEM)
def test_cached_prefix_tokens_do_not_count_against_the_token_budget(make):
    engine = fake_engine(make(), max_num_batched_tokens=16, block_size=4, num_blocks=64)
    shared = list(range(1, 13))
    engine.add([*shared, 20], params(max_tokens=1))
    drain(engine)
    for last in range(21, 25):
        engine.add([*shared, last], params(max_tokens=1))
    plan = engine.scheduler.plan(look(engine))
    assert [count for _, count in plan.prefill] == [1, 1, 1, 1]


@pytest.mark.parametrize("make", ALL_OF_THEM)
def test_out_of_blocks_the_newest_request_is_preempted_and_queued_at_the_head(make):
    engine = fake_engine(make(), num_blocks=8, block_size=2, max_model_len=16, prefix_caching=False)
    for index in range(2):
        engine.add([index + 1] * 5, params(max_tokens=10))
    engine.add([9], params(max_tokens=10))
    while not any(request.num_preemptions for request in engine.queue.live.values()):
        engine.step()
    assert [request.id for request in engine.queue.waiting.values()][-1] == 2
    assert 0 in engine.queue.running


@pytest.mark.parametrize("make", ALL_OF_THEM)
def test_preempted_requests_resume_with_the_same_tokens(make):
    engine = fake_engine(make(), num_blocks=10, block_size=2, max_model_len=20)
    prompts = [[index + 1] * 4 for index in range(5)]
    for prompt in prompts:
        engine.add(prompt, params(max_tokens=12))
    outputs = sorted(drain(engine), key=lambda output: output.request_id)
    assert sum(output.num_preemptions for output in outputs) > 3
    assert [output.token_ids for output in outputs] == [completion(1, prompt, 12, 50) for prompt in prompts]


@pytest.mark.parametrize("make", ALL_OF_THEM)
def test_a_running_request_that_fills_the_whole_pool_ends_with_length(make):
    engine = fake_engine(make(), num_blocks=4, block_size=4, max_model_len=128)
    engine.add([1] * 10, params(max_tokens=100))
    output = drain(engine)[0]
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 6


def test_a_watermark_keeps_blocks_free_beside_running_requests():
    engine = fake_engine(PrefillFirst(PrefillFirstConfig(watermark=0.5)), num_blocks=16, block_size=4, max_model_len=60)
    engine.add([1] * 20, params(max_tokens=8))
    engine.add([2] * 20, params(max_tokens=8))
    engine.step()
    assert list(engine.queue.running) == [0]
    assert len(drain(engine)) == 2


def test_chunked_gives_every_running_request_a_token_in_every_step_while_prompts_queue():
    engine = fake_engine(Chunked(ChunkedConfig()), max_num_batched_tokens=16, num_blocks=256, max_num_seqs=8)
    engine.add([1, 2], params(max_tokens=30))
    engine.step()
    for index in range(6):
        engine.add([index + 3] * 40, params(max_tokens=2))
    for expected in range(2, 12):
        engine.step()
        assert engine.queue.live[0].num_output_tokens == expected


def planned(engine):
    """The requests whose prompts the engine would compute next."""
    return [id_ for id_, _ in engine.scheduler.plan(look(engine)).prefill]


def test_those_with_most_left_to_generate_begin_first():
    engine = fake_engine(LongestFirst(LongestFirstConfig()), max_num_seqs=2, max_num_batched_tokens=8)
    for max_tokens in (4, 9, 2, 9, 7):
        engine.add([1, 2, 3], params(max_tokens=max_tokens))
    assert planned(engine) == [1, 3]
    engine.step()
    order = [output.request_id for output in drain(engine)]
    assert order == [1, 3, 0, 2, 4]  # 4 and 0 begin together, and 0 has less to do


def test_a_second_of_waiting_counts_as_tokens():
    engine = fake_engine(LongestFirst(LongestFirstConfig(ageing_tokens_per_s=3.0)), max_num_seqs=1)
    now_s = 0.0
    engine.clock = lambda: now_s
    engine.add([1], params(max_tokens=4))
    now_s = 1.0
    engine.add([1], params(max_tokens=6))
    assert planned(engine) == [0]
    engine.add([1], params(max_tokens=8))
    assert planned(engine) == [2]


def test_an_answer_that_was_preempted_goes_on_before_longer_ones_that_arrived_since():
    engine = fake_engine(LongestFirst(LongestFirstConfig()), num_blocks=8, block_size=2, max_model_len=16)
    engine.clock = lambda: 0.0
    old = [engine.add([index + 1] * 5, params(max_tokens=8)) for index in range(2)]
    while not engine.queue.live[old[1]].num_preemptions:
        engine.step()
    engine.add([9] * 2, params(max_tokens=14))
    assert engine.queue.live[old[1]].num_output_tokens > 0
    assert [output.request_id for output in drain(engine)][:2] == old


def test_a_plan_that_is_not_carried_out_and_an_abort_leave_nothing_behind():
    engine = fake_engine(LongestFirst(LongestFirstConfig()), max_num_seqs=1)
    ids = [engine.add([1, 2], params(max_tokens=max_tokens)) for max_tokens in (4, 9, 7, 3)]
    assert planned(engine) == [1]
    engine.abort([ids[2]])
    assert planned(engine) == planned(engine) == [1]
    assert [output.request_id for output in drain(engine)] == [1, 0, 3]


def test_a_decode_and_prompts_share_a_step_of_at_most_the_budget():
    engine = fake_engine(LongestFirst(LongestFirstConfig()), max_num_batched_tokens=8, max_num_seqs=8)
    engine.add([1, 2, 3], params(max_tokens=9))
    engine.step()
    engine.add([1] * 20, params(max_tokens=2))
    plan = engine.scheduler.plan(look(engine))
    assert plan.decode is ALL and list(plan.prefill) == [(1, 7)]


def batch_engine(pace=True, max_num_batched_tokens=384):
    return fake_engine(
        LongestFirst(LongestFirstConfig(pace=pace)), num_blocks=8000, block_size=8, max_num_seqs=128,
        max_model_len=1024, max_num_batched_tokens=max_num_batched_tokens, prefix_caching=False,
    )  # fmt: skip


def steps_of_a_batch(output_lens, *engine):
    """(prompt tokens, decodes) of every step until all are done, of prompts of 200 to 600 tokens."""
    engine = batch_engine(*engine)
    rng, steps = random.Random(0), []
    for max_tokens in output_lens:
        engine.add([rng.randrange(1, 50)] * rng.randint(200, 600), params(max_tokens=max_tokens, ignore_eos=True))
    while engine.has_work:
        engine.step()
        if engine.last_stats is not None:
            steps.append((engine.last_stats.num_prefill_tokens, engine.last_stats.num_decode_tokens))
    return steps


SPREAD = [20 + 3 * (37 * i % 100) for i in range(100)]


@pytest.mark.slow
def test_prompts_of_short_answers_are_left_for_later_and_all_end_as_soon():
    at_once, paced = (steps_of_a_batch(SPREAD, pace) for pace in (False, True))
    assert [sum(kind) for kind in zip(*paced, strict=True)] == [sum(kind) for kind in zip(*at_once, strict=True)]
    assert len(paced) <= len(at_once) + 4
    assert sum(tokens == 0 for tokens, _ in paced) < 0.7 * sum(tokens == 0 for tokens, _ in at_once)
    assert max(map(sum, paced[8:])) <= 256 < max(map(sum, at_once[8:]))


@pytest.mark.slow
def test_a_step_with_prompts_is_filled_up_to_whole_tiles():
    steps = steps_of_a_batch(SPREAD)
    filled = [sum(step) for step in steps if step[0]]
    assert set(filled[:-1]) <= {128, 256, 384} and len(set(filled)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("output_lens", [[60] * 100, [300] * 99 + [20], [300] + [20] * 99])
@pytest.mark.parametrize("budget", [150, 190, 320, 384])
def test_no_answer_waits_for_the_pace(output_lens, budget):
    at_once, paced = (steps_of_a_batch(output_lens, pace, budget) for pace in (False, True))
    assert len(paced) <= len(at_once) + 4


def planned_tokens(engine):
    return sum(tokens for _, tokens in engine.scheduler.plan(look(engine)).prefill)


def test_a_pace_follows_arrivals_at_once():
    engine = batch_engine()
    engine.add([1] * 10, params(max_tokens=400, ignore_eos=True))
    engine.add([1] * 300, params(max_tokens=10, ignore_eos=True))
    engine.step()
    assert planned_tokens(engine) == 127, "no hurry"
    for _ in range(4):
        engine.add([1] * 300, params(max_tokens=395, ignore_eos=True))
    assert planned_tokens(engine) == 383


def test_a_pace_follows_fewer_arrivals_than_there_were_before():
    engine = batch_engine()
    for _ in range(5):
        engine.add([1] * 10, params(max_tokens=400, ignore_eos=True))
    for _ in range(30):
        engine.step()
    for _ in range(4):
        engine.add([1] * 300, params(max_tokens=365, ignore_eos=True))
    assert planned_tokens(engine) == 379


@pytest.mark.parametrize("seed", range(5))
def test_what_is_kept_of_the_queue_follows_arrivals_aborts_and_preemptions(seed):
    """Compared with a policy that has never seen the queue before."""
    kept = fake_engine(
        LongestFirst(LongestFirstConfig(pace=True)), num_blocks=12, block_size=2, max_model_len=20, max_num_seqs=3
    )
    rng = random.Random(seed)
    ids, preemptions = [], 0
    for _ in range(300):
        if rng.random() < 0.3:
            ids.append(kept.add([rng.randrange(1, 50)] * rng.randint(1, 8), params(max_tokens=rng.randint(1, 12))))
        if rng.random() < 0.1 and ids:
            kept.abort([rng.choice(ids)])
        for _ in range(rng.randint(0, 2) if kept.has_work else 0):
            fresh, view = LongestFirst(LongestFirstConfig(pace=True)), look(kept)
            assert kept.scheduler.plan(look(kept)) == fresh.plan(look(kept))
            assert kept.scheduler._ranked.pace(view) == fresh._ranked.pace(view)
            if rng.random() < 0.2:  # between this plan, which is not carried out, and the next
                kept.abort([rng.choice(ids)])
        if kept.has_work:
            outputs = kept.step()
            preemptions += sum(output.num_preemptions for output in outputs)
    assert preemptions > 3


@pytest.mark.parametrize("ageing", [0.0, -1.0, float("inf"), float("nan")])
def test_a_request_cannot_starve_by_configuration(ageing):
    with pytest.raises(ConfigError, match=r"scheduler.ageing_tokens_per_s=\S+ must be a finite number above 0"):
        build(LongestFirstConfig, {"ageing_tokens_per_s": ageing}, "scheduler")


@pytest.mark.parametrize("config", [PrefillFirstConfig, ChunkedConfig, LongestFirstConfig])
@pytest.mark.parametrize("watermark", [-1.0, 1.0, float("inf"), float("nan")])
def test_a_watermark_that_keeps_no_fraction_of_the_blocks_free_is_refused(config, watermark):
    with pytest.raises(ConfigError, match=r"scheduler.watermark=\S+ must be"):
        build(config, {"watermark": watermark}, "scheduler")
