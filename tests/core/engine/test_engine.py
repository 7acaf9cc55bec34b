"""The step loop over a fake executor: admission, ends, prefixes, aborts, bad policies, observers."""

import random
import re
from typing import ClassVar

import numpy as np
import pluggy
import pytest

from hookline.core.contracts import ALL, Plan, hookimpl
from hookline.core.contracts.hooks import PROJECT
from hookline.core.errors import HooklineError, PlanError, PluginError, RequestError
from hookline.core.kv_cache.block_pool import hash_block
from hookline.core.outputs import FinishReason
from hookline.core.plugin.observers import Observers
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.scheduling import plan_mixed
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import RandomLoad, SchedulerSuite, drain, look

HASH_BLOCK = "hookline.core.kv_cache.prefix_index.hash_block"


class Scripted:
    """Returns prepared plans."""

    def __init__(self, *plans):
        self.plans = list(plans)

    def plan(self, view):
        return self.plans.pop(0)


class Mixed:
    """Decodes and prompt chunks in the same step."""

    def plan(self, view):
        return plan_mixed(view, 0.0)


class TakesEach(PlainScheduler):
    """Names who decodes one by one, and counts their blocks one by one."""

    def decode(self, view):
        plan = super().decode(view)
        decoding = [one for one in view.running if not one.is_prefilling and one.id not in plan.preempt]
        fitting = [one.id for one in decoding if view.budget.take(one, 1)]
        assert plan.preempt or len(fitting) == len(decoding)
        return Plan(decode=fitting, preempt=plan.preempt)


class TestTakesEach(SchedulerSuite):
    def make(self):
        return TakesEach()


def greedy(max_tokens=4, **options):
    return SamplingParams(max_tokens=max_tokens, seed=1, **options)


def run_one(engine, prompt, params):
    engine.add(prompt, params)
    return drain(engine)[0]


def test_a_request_gets_max_tokens_and_finish_reason_length():
    output = run_one(fake_engine(PlainScheduler()), [1, 2, 3], greedy(5))
    assert output.token_ids == completion(1, [1, 2, 3], 5, 50)
    assert output.finish_reason is FinishReason.LENGTH


def test_every_end_of_sequence_id_of_the_checkpoint_stops_a_request():
    free = completion(1, [1, 2, 3], 8, 50)
    for stop in free[2], free[4]:
        output = run_one(fake_engine(PlainScheduler(), eos_token_ids=[stop, 77]), [1, 2, 3], greedy(8))
        assert output.token_ids == free[: free.index(stop) + 1]
        assert output.finish_reason is FinishReason.STOP


def test_ignore_eos_runs_on_and_stop_token_ids_still_stop():
    free = completion(1, [1, 2, 3], 8, 50)
    engine = fake_engine(PlainScheduler(), eos_token_ids=[free[1]])
    assert run_one(engine, [1, 2, 3], greedy(8, ignore_eos=True)).token_ids == free
    assert run_one(engine, [1, 2, 3], greedy(8, ignore_eos=True, stop_token_ids=(free[3],))).token_ids == free[:4]


def test_min_tokens_keeps_stop_tokens_from_being_drawn():
    free = completion(1, [1, 2, 3], 8, 50)
    engine = fake_engine(PlainScheduler(), eos_token_ids=[free[1]])
    output = run_one(engine, [1, 2, 3], greedy(6, min_tokens=3))
    assert free[1] not in output.token_ids[:3]
    assert len(output.token_ids) >= 3


def test_a_shared_prefix_is_found_by_a_later_request():
    engine = fake_engine(PlainScheduler(), block_size=4)
    run_one(engine, list(range(1, 14)), greedy(2))
    output = run_one(engine, [*range(1, 13), 40, 41], greedy(2))
    assert output.num_cached_tokens == 12
    assert output.token_ids == completion(1, [*range(1, 13), 40, 41], 2, 50)


def test_generated_tokens_are_found_by_a_follow_up_prompt():
    engine = fake_engine(PlainScheduler(), block_size=4)
    first = run_one(engine, [1, 2, 3], greedy(8))
    follow_up = [1, 2, 3, *first.token_ids, 9]
    assert run_one(engine, follow_up, greedy(2)).num_cached_tokens == 8


def test_prefixes_shared_inside_one_step_are_stored_once():
    engine = fake_engine(PlainScheduler(), block_size=4, max_num_batched_tokens=512, max_num_seqs=8, num_blocks=64)
    prompts = [[*range(1, 17), 30 + index] for index in range(8)]
    for prompt in prompts:
        engine.add(prompt, greedy(3))
    engine.step()
    assert engine.last_stats.num_prefill_tokens == 17 + 7 * 1
    assert engine.pool.num_blocks - engine.pool.num_free == 4 + 8
    outputs = sorted(drain(engine), key=lambda output: output.request_id)
    assert [output.token_ids for output in outputs] == [completion(1, prompt, 3, 50) for prompt in prompts]


def test_a_fully_cached_prompt_still_computes_its_last_token():
    engine = fake_engine(PlainScheduler(), block_size=4)
    prompt = list(range(1, 9))
    first = run_one(engine, prompt, greedy(3))
    second = run_one(engine, prompt, greedy(3))
    assert second.num_cached_tokens == 4
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_generated_blocks_are_found_however_the_policy_counts_its_decodes(overlap):
    engine = fake_engine(TakesEach(), block_size=4, overlap=overlap)
    first = run_one(engine, [1, 2, 3], greedy(12))
    assert run_one(engine, [1, 2, 3, *first.token_ids, 9], greedy(2)).num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_found():
    engine = fake_engine(PlainScheduler(), prefix_caching=False)
    run_one(engine, [1] * 12, greedy())
    assert run_one(engine, [1] * 12, greedy()).num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([3, 50], "token id 50 is outside the vocabulary (0 to 49)"),
        ([-1], "token id -1 is outside the vocabulary"),
        (["a"], "must be whole numbers"),
        (["1", "2"], "must be whole numbers"),
        ([1.0, 2.0], "must be whole numbers"),
        ([True, False], "must be whole numbers"),
        ([[1, 2]], "must be whole numbers"),
        (b"ab", "must be whole numbers"),
        ([1] * 128, "the prompt has 128 tokens; a prompt may have at most 127 tokens: raise engine.max_model_len=128"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_value_and_limit(prompt, message):
    with pytest.raises(RequestError) as caught:
        fake_engine(PlainScheduler()).add(prompt, greedy())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(logprobs=6), "sampling.logprobs=6 is more than the vocabulary's 5 tokens"),
        (dict(prompt_logprobs=20), "sampling.prompt_logprobs=20 is more than the vocabulary's 5 tokens"),
        (
            dict(stop_token_ids=[2, 5], min_tokens=2),
            "sampling.stop_token_ids: token id 5 is outside the vocabulary (0 to 4)",
        ),
        (
            dict(allowed_token_ids=[1], min_tokens=2),
            "sampling.allowed_token_ids=[1] holds only tokens that end the request, which sampling.min_tokens=2",
        ),
    ],
)
def test_draws_that_the_vocabulary_cannot_give_are_refused(options, message):
    engine = fake_engine(PlainScheduler(), vocab_size=5, eos_token_ids=(1,))
    with pytest.raises(RequestError) as caught:
        engine.add([0], SamplingParams(**options))
    assert str(caught.value).startswith(message)


def test_a_prompt_larger_than_the_pool_is_refused_and_the_others_run_on():
    engine = fake_engine(PlainScheduler(), num_blocks=4, block_size=4)
    engine.add([1, 2], greedy())
    with pytest.raises(RequestError, match="the KV cache holds 4 blocks of 4 tokens"):
        engine.add([1] * 16, greedy())
    engine.add([3, 4], greedy())
    assert len(drain(engine)) == 2


def test_output_ends_exactly_at_max_model_len():
    engine = fake_engine(PlainScheduler(), max_model_len=16)
    output = run_one(engine, [1] * 15, greedy(10))
    assert len(output.token_ids) == 1
    assert output.finish_reason is FinishReason.LENGTH


def test_a_refused_request_is_an_output_with_its_reason():
    output = fake_engine(PlainScheduler()).refuse([], RequestError("the prompt is empty"), "")
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "the prompt is empty"


def test_abort_frees_everything_and_ignores_unknown_ids():
    engine = fake_engine(PlainScheduler())
    ids = [engine.add([index + 1] * 6, greedy()) for index in range(3)]
    engine.step()
    assert [output.finish_reason for output in engine.abort([*ids, 99])] == [FinishReason.ABORT] * 3
    assert engine.abort(ids) == []
    assert engine.pool.num_free == engine.pool.num_blocks
    check_engine(engine)


def test_a_step_that_breaks_off_leaves_no_request_and_no_findable_block():
    engine = fake_engine(PlainScheduler())
    engine.add([1] * 9, greedy())
    engine.executor.launch = lambda step: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert not engine.has_work
    del engine.executor.launch
    assert run_one(engine, [1] * 9, greedy()).num_cached_tokens == 0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(prefill=[(9, 1)]), "names request 9 in prefill, which is neither waiting nor running"),
        (Plan(prefill=[(0, 5)]), "prefills 5 tokens of request 0, which has 3 left"),
        (Plan(prefill=[(0, 0)]), "prefills 0 tokens of request 0; at least 1 is needed"),
        (Plan(prefill=[(0, 1), (0, 1)]), "names request 0 twice"),
        (Plan(decode=[0]), "decodes request 0, which is not running"),
        (Plan(preempt=[0]), "preempts request 0, which is not running"),
        (Plan(), "plans nothing with 2 requests waiting and 0 running"),
        (None, "returned a NoneType, not a Plan"),
        (Plan(prefill=[0]), "returned a malformed plan"),
        (Plan(prefill=[(0, 1.5)]), "returned a malformed plan"),
        (Plan(decode=3), "returned a malformed plan"),
        (Plan(decode="all"), "names 'all' in decode, not a list; all that can decode are contracts.ALL"),
        (Plan(idle_s="soon"), "asks to wait idle_s='soon', which is no number of seconds"),
        (Plan(idle_s=None), "asks to wait idle_s=None, which is no number of seconds"),
        (Plan(prefill=[(0, 3), (1, 30)]), "plans 33 tokens, more than max_num_batched_tokens=32"),
    ],
)
def test_a_plan_that_breaks_a_rule_names_the_policy_and_changes_nothing(plan, message):
    engine = fake_engine(Scripted(plan), policy="rough")
    engine.add([1, 2, 3], greedy())
    engine.add([2] * 30, greedy())
    with pytest.raises(PlanError) as caught:
        engine.step()
    assert "'rough'" in str(caught.value) and message in str(caught.value)
    assert len(engine.queue.waiting) == 2 and engine.pool.num_free == engine.pool.num_blocks
    engine.scheduler = PlainScheduler()
    assert len(drain(engine)) == 2


def test_a_policy_that_raises_is_named_and_the_engine_goes_on():
    class Raises:
        def plan(self, view):
            return view.nonsense

    engine = fake_engine(Raises(), policy="rough")
    engine.add([1, 2, 3], greedy())
    with pytest.raises(PlanError, match="scheduler 'rough' fails in plan: AttributeError"):
        engine.step()
    engine.scheduler = PlainScheduler()
    assert len(drain(engine)) == 1


def test_a_request_that_waits_for_its_last_token_cannot_be_planned():
    engine = fake_engine(Scripted(Plan(prefill=[(0, 3)]), Plan(prefill=[(0, 1)]), Plan()), overlap=True)
    engine.add([1, 2, 3], greedy(1))
    engine.add([4], greedy(1))
    engine.step()
    assert 0 in engine.queue.ending
    assert [output.request_id for output in engine.step()] == [0]


def test_a_plan_over_max_num_seqs_or_over_the_pool_is_refused():
    both = Plan(prefill=[(0, 8), (1, 8)])
    for sizes, message in ({"max_num_seqs": 1}, "more than max_num_seqs=1"), ({"num_blocks": 3}, "of 3 are free"):
        engine = fake_engine(Scripted(both), max_model_len=12, **sizes)
        engine.add([1] * 8, greedy())
        engine.add([2] * 8, greedy())
        with pytest.raises(PlanError, match=message):
            engine.step()


def test_a_decoding_request_cannot_be_prefilled_nor_a_prefilling_one_decoded():
    rest = Plan(prefill=[(0, 1)])
    engine = fake_engine(Scripted(Plan(prefill=[(0, 2)]), Plan(decode=[0]), rest, rest))
    engine.add([1, 2, 3], greedy())
    engine.step()
    with pytest.raises(PlanError, match="still prefilling"):
        engine.step()
    engine.step()
    with pytest.raises(PlanError, match="which is decoding"):
        engine.step()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(decode=[0, 1, 0]), "names request 0 twice"),
        (Plan(decode=[1, 0], preempt=[0]), "names request 0 twice"),
        (Plan(decode=[0, 7]), "names request 7 in decode, which is neither waiting nor running"),
        (Plan(decode=[2, 1]), "decodes request 2, which is not running"),
        (Plan(decode=ALL, prefill=[(1, 1)]), "prefills request 1, which is decoding"),
        (Plan(decode=[0, 1], prefill=[(1, 1)]), "names request 1 twice"),
        (Plan(decode=ALL), "needs 1 blocks for 1 tokens of request 1, and 0 of 5 are free"),
        (Plan(decode=[1, 0]), "needs 1 blocks for 1 tokens of request 0, and 0 of 5 are free"),
    ],
)
def test_a_plan_that_breaks_a_rule_in_its_decodes_names_the_request(plan, message):
    engine = fake_engine(Scripted(Plan(prefill=[(0, 8), (1, 8)]), plan), num_blocks=5, block_size=4)
    for first, length in (1, 8), (2, 8), (3, 3):
        engine.add([first] * length, greedy())
    engine.step()
    with pytest.raises(PlanError, match=re.escape(message)):
        engine.step()
    engine.scheduler = PlainScheduler()
    assert len(drain(engine)) == 3


def test_all_decode_but_the_preempted():
    engine = fake_engine(Scripted(Plan(prefill=[(0, 3), (1, 3)]), Plan(decode=ALL, preempt=[0])))
    for first in 1, 2:
        engine.add([first] * 3, greedy())
    engine.step()
    engine.step()
    assert engine.last_stats.num_decode_tokens == 1 and list(engine.queue.waiting) == [0]


def test_taking_all_decodes_costs_what_taking_each_costs():
    engine = fake_engine(PlainScheduler(), block_size=4, num_blocks=40)
    for length in range(2, 8):
        engine.add([length] * length, greedy())
    engine.step()
    together, each = look(engine), look(engine)
    assert together.budget.take_decodes() and all(each.budget.take(one, 1) for one in each.running)
    assert together.budget.num_free == each.budget.num_free < engine.pool.num_free


def test_taking_all_decodes_takes_nothing_if_they_do_not_all_fit():
    engine = fake_engine(PlainScheduler(), block_size=4, num_blocks=3)
    for first in 1, 2:
        engine.add([first] * 4, greedy())
    engine.step()
    budget = look(engine).budget
    assert not budget.take_decodes() and budget.num_free == 1


def test_a_view_shows_who_is_prefilling_apart():
    engine = fake_engine(Scripted(Plan(prefill=[(0, 3), (1, 2), (2, 3)])))
    for first in 1, 2, 3:
        engine.add([first] * 3, greedy())
    engine.step()
    assert [one.id for one in look(engine).prefilling] == [1]


def test_a_policy_may_wait_but_not_for_ever():
    class Waits:
        def plan(self, view):
            return Plan(idle_s=0.01)

    engine = fake_engine(Waits(), stall_timeout_s=0.05)
    engine.add([1], greedy())
    with pytest.raises(PlanError, match="has waited longer than"):
        while True:
            engine.step()


class Sleeper:
    """The clock of an engine whose sleep comes back early, after 10 ms."""

    now_s = 0.0

    def sleep(self, seconds):
        self.now_s += min(seconds, 0.01)


def waits_until_stalled(engine):
    for num_waits in range(1000):
        try:
            engine.step()
        except PlanError as error:
            assert "has waited longer than engine.stall_timeout_s" in str(error)
            return num_waits
    raise AssertionError("it never stalls")


def test_the_time_that_a_policy_waited_counts_and_not_the_time_it_asked_for():
    engine, sleeper = fake_engine(Scripted(*[Plan(idle_s=1.0)] * 400), stall_timeout_s=1.0), Sleeper()
    engine.clock, engine.sleep = lambda: sleeper.now_s, sleeper.sleep
    first = engine.add([1], greedy())
    expected = pytest.approx(101, abs=1)
    assert waits_until_stalled(engine) == expected
    assert waits_until_stalled(engine) == expected, "what was waited before the stall does not count again"
    for _ in range(60):
        engine.step()
    engine.abort([first])
    engine.add([1], greedy())
    assert waits_until_stalled(engine) == expected, "what others waited is over"


def test_what_a_policy_waited_is_forgotten_once_it_computes():
    class Hesitates(PlainScheduler):
        waits = False

        def plan(self, view):
            self.waits = not self.waits
            return Plan(idle_s=0.02) if self.waits else super().plan(view)

    engine = fake_engine(Hesitates(), stall_timeout_s=0.05)
    assert len(run_one(engine, [1], greedy(8)).token_ids) == 8


def test_a_policy_that_only_preempts_and_recomputes_is_stopped():
    class Churns:
        def plan(self, view):
            if view.running:
                return Plan(preempt=[view.running[0].id])
            return Plan(prefill=[(view.waiting[0].id, 1)])

    engine = fake_engine(Churns(), policy="churn", origin="plugin 'x' (hookline-x 1.0)")
    engine.add([1, 2, 3], greedy())
    with pytest.raises(PlanError, match=r"^scheduler 'churn' of plugin 'x' \(hookline-x 1\.0\) makes no progress"):
        while True:
            engine.step()


@pytest.mark.parametrize(("prompt_len", "max_tokens", "limits"), [(1, 40, {}), (40, 1, {"max_num_batched_tokens": 8})])
def test_each_token_of_a_long_prompt_or_answer_counts_as_progress(monkeypatch, prompt_len, max_tokens, limits):
    monkeypatch.setattr("hookline.core.engine.policy.MAX_FRUITLESS_PLANS", 3)
    engine = fake_engine(Scripted(*[Plan(prefill=[(0, 1)])] * prompt_len, *[Plan(decode=ALL)] * max_tokens), **limits)
    engine.add([1] * prompt_len, greedy(max_tokens=max_tokens))
    assert len(drain(engine)) == 1


@pytest.mark.parametrize("num_hashes", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_colliding_hashes_never_cost_a_token(monkeypatch, num_hashes, seed):
    monkeypatch.setattr(
        HASH_BLOCK,
        lambda previous, tokens: hash_block(previous, tokens) % num_hashes,
    )
    RandomLoad(Mixed(), random.Random(seed), num_blocks=18).run(abort_chance=0.05)


def test_whom_a_colliding_hash_promised_a_block_waits_if_there_is_no_other(monkeypatch):
    ones, twos = (np.full(4, token, dtype=np.int32).tobytes() for token in (1, 2))
    monkeypatch.setattr(
        HASH_BLOCK,
        lambda *given: 7 if given[1] in (ones, twos) else hash_block(*given),
    )
    engine = fake_engine(PlainScheduler(), num_blocks=4)
    run_one(engine, [3] * 5, greedy(1))
    engine.scheduler = Scripted(Plan(prefill=[(1, 5), (2, 9)]))
    engine.add([1] * 5, greedy(1))
    second = engine.add([3] * 4 + [2] * 5, greedy(2))
    engine.step()  # the second's first block is found, the next one looks like the other's first
    request = engine.queue.live[second]
    assert (list(engine.queue.waiting), request.blocks, request.num_computed_tokens) == ([second], [], 0)
    assert engine.pool.num_free == 4
    engine.scheduler = PlainScheduler()
    [output] = drain(engine)
    assert output.token_ids == completion(1, [3] * 4 + [2] * 5, 2, 50) and output.num_cached_tokens == 4


def test_a_plan_may_name_tokens_that_turn_out_to_be_cached():
    engine = fake_engine(PlainScheduler())
    run_one(engine, [3] * 9, greedy(1))
    engine.scheduler = Scripted(Plan(prefill=[(1, 9)]))
    output = run_one(engine, [3] * 9, greedy(1))
    assert (output.num_cached_tokens, output.token_ids) == (8, completion(1, [3] * 9, 1, 50))
    assert len(engine.executor.steps[-1].token_ids_T) == 1


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_block_is_found_as_soon_as_its_last_token_is_computed(max_tokens):
    engine = fake_engine(PlainScheduler())
    engine.add([5] * 8, SamplingParams(max_tokens=max_tokens, seed=1))
    [first] = drain(engine)
    computed = [*[5] * 8, *first.token_ids[:-1]]
    engine.add([*computed, 6], SamplingParams(max_tokens=1, seed=1))
    [second] = drain(engine)
    assert (len(computed), second.num_cached_tokens) == (7 + max_tokens, (7 + max_tokens) // 4 * 4)


def test_in_a_forked_child_an_engine_takes_and_computes_nothing_and_ends_nobody():
    engine = fake_engine(PlainScheduler())
    engine.add([1, 2], greedy())
    engine.home._pid -= 1  # as if this process were another one
    for use in (engine.step, lambda: engine.add([1], greedy())):
        with pytest.raises(HooklineError, match="this engine belongs to process"):
            use()
    engine.close()
    engine.home._pid += 1
    assert not engine.executor.is_closed
    assert len(drain(engine)) == 1
    engine.close()


def test_a_closed_engine_refuses_requests_and_closes_twice_without_harm():
    engine = fake_engine(PlainScheduler())
    engine.add([1], greedy())
    engine.close()
    engine.close()
    assert engine.executor.is_closed and not engine.has_work
    with pytest.raises(HooklineError, match="closed"):
        engine.add([1], greedy())


def observed(plugin):
    from hookline.core.contracts import hooks as hookspecs

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, "their-dist:watcher")
    return Observers(manager)


def test_observers_see_who_ends_at_its_time_limit_and_whoever_ended_before_is_left_alone():
    seen = []

    class Watcher:
        @hookimpl
        def on_request_end(self, output):
            seen.append((output.request_id, output.finish_reason))

    engine = fake_engine(PlainScheduler(), observers=observed(Watcher()))
    engine.clock = lambda: 0.0
    engine.add([1], greedy(2), options=RequestOptions(timeout_s=5.0))
    drain(engine)
    engine.add([1], greedy(50), options=RequestOptions(timeout_s=5.0))
    engine.step()
    engine.clock = lambda: 6.0
    [late] = engine.step()
    assert seen == [(0, FinishReason.LENGTH), (1, FinishReason.ABORT)]
    assert late.error == "timeout_s=5.0 passed before it was done" and not engine.has_work


@pytest.mark.parametrize("prompt_len", [1, 4, 9])
def test_overlap_gives_the_same_tokens_and_reasons_and_draws_one_too_many(prompt_len):
    prompt = list(range(1, prompt_len + 1))
    free = completion(1, prompt, 12, 50)

    def outputs(overlap):
        engine = fake_engine(PlainScheduler(), overlap=overlap, eos_token_ids=[free[5]], num_blocks=20)
        for seed in range(6):
            engine.add([*prompt, seed], SamplingParams(max_tokens=10, seed=seed))
        engine.add(prompt, greedy(12))
        found = [(o.request_id, o.token_ids, o.finish_reason) for o in drain(engine)]
        assert engine.pool.num_free == 20
        return sorted(found), len(engine.executor.steps)

    (plain, plain_steps), (overlapped, steps) = outputs(False), outputs(True)
    assert plain == overlapped
    assert steps >= plain_steps


def test_with_overlap_a_step_is_launched_before_the_last_ones_tokens_are_known():
    engine = fake_engine(PlainScheduler(), overlap=True)
    engine.add([1, 2, 3], greedy(3))
    assert engine.step() == []
    assert len(engine.executor.steps) == 1 and engine.queue.live[0].num_known_outputs == 0
    assert engine.step() == []
    assert len(engine.executor.steps) == 2 and engine.queue.live[0].num_known_outputs == 1
    assert engine.step() == []
    assert len(drain(engine)) == 1
    assert len(engine.executor.steps) == 3


def test_a_request_aborted_while_its_step_is_in_flight_leaves_nothing_behind():
    for num_steps in range(1, 6):
        engine = fake_engine(PlainScheduler(), overlap=True, num_blocks=16)
        first = engine.add([1] * 9, greedy(6))
        engine.add([1] * 9, greedy(6))
        for _ in range(num_steps):
            engine.step()
            check_engine(engine)
        engine.abort([first])
        outputs = drain(engine)
        assert outputs[0].token_ids == completion(1, [1] * 9, 6, 50)
        assert engine.pool.num_free == 16


def test_observers_see_the_start_every_step_every_end_and_the_stop():
    class Watcher:
        seen: ClassVar = []

        @hookimpl
        def on_engine_start(self, engine):
            self.seen.append("start")

        @hookimpl
        def on_step_end(self, stats):
            self.seen.append(stats.num_prefill_tokens)

        @hookimpl
        def on_request_end(self, output):
            self.seen.append(output.finish_reason)

        @hookimpl
        def on_engine_stop(self, engine):
            self.seen.append("stop")

    engine = fake_engine(PlainScheduler(), observers=observed(Watcher()))
    run_one(engine, [1, 2, 3], greedy(2))
    engine.close()
    assert Watcher.seen == ["start", 3, FinishReason.LENGTH, 0, "stop"]


def test_an_observer_that_raises_is_switched_off_and_named_and_requests_go_on(caplog):
    class Clumsy:
        num_calls, stopped = 0, False

        @hookimpl
        def on_step_end(self, stats):
            self.num_calls += 1
            raise KeyError("oops")

        @hookimpl
        def on_engine_stop(self, engine):
            self.stopped = True

    clumsy = Clumsy()
    engine = fake_engine(PlainScheduler(), observers=observed(clumsy))
    assert run_one(engine, [1], greedy(4)).finish_reason is FinishReason.LENGTH
    assert (
        "on_step_end of plugin 'watcher' (their-dist) raised KeyError: 'oops' (" in caplog.text
        and clumsy.num_calls == 1
    )
    with pytest.raises(PluginError, match=r"on_step_end of plugin 'watcher' \(their-dist\) raised KeyError"):
        engine.close()
    assert engine.executor.is_closed and clumsy.stopped


def test_the_same_requests_get_the_same_seeds_on_a_fresh_engine():
    def outputs():
        engine = fake_engine(PlainScheduler())
        return [run_one(engine, [1, 2], SamplingParams(max_tokens=6)).token_ids for _ in range(3)]

    first = outputs()
    assert first == outputs()
    assert first[0] != first[1]


def test_a_view_of_the_queue_is_a_sequence():
    engine = fake_engine(PlainScheduler())
    for _ in range(3):
        engine.add([1], greedy())
    waiting = look(engine).waiting
    assert [waiting[index].id for index in (0, 2, -1, -3)] == [0, 2, 2, 0]
    assert [one.id for one in waiting[1:]] == [1, 2] and [one.id for one in reversed(waiting)] == [2, 1, 0]
    for index in (3, -4):
        with pytest.raises(IndexError):
            waiting[index]
