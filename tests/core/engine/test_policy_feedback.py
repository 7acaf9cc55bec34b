"""What a policy with a memory is told of its plans, and what core counts for it by tag."""

from __future__ import annotations

import re

import pytest

from hookline.core.contracts import ALL, MAX_SERVED_VALUES, Needs, Plan, ServedTokens
from hookline.core.engine.policy_feedback import ServedCounts
from hookline.core.errors import PlanError, PluginError, StepFault
from hookline.core.outputs import FinishReason
from hookline.core.plugin.check_contract import contract_fault
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import drain
from hookline.core.testing.scheduler_suite.policy_memory import Overheard


def params(max_tokens=4, **options):
    return SamplingParams(max_tokens=max_tokens, seed=1, **options)


def overheard(policy=None, **options):
    policy = Overheard(policy or PlainScheduler())
    return policy, fake_engine(policy, **options)


def test_a_step_tells_what_it_computed_and_found_cached():
    policy, engine = overheard(block_size=4, max_num_batched_tokens=8)
    engine.add(list(range(1, 11)), params(max_tokens=2))
    drain(engine)
    found = [(step.num_prefill_tokens, step.num_decodes, step.num_generated_tokens) for step in policy.steps]
    assert found == [(8, 0, 0), (2, 0, 1), (0, 1, 1)]
    assert policy.steps[2].num_context_tokens == 11 and policy.steps[2].ended[0].reason is FinishReason.LENGTH
    engine.add(list(range(1, 11)), params(max_tokens=1))
    drain(engine)
    last = policy.steps[-1].prefilled[0]
    assert (last.num_tokens, last.num_new_tokens, last.num_cached_tokens, last.is_sampled) == (2, 2, 8, True)


def test_a_step_tells_who_keeps_how_many_tokens():
    policy, engine = overheard(block_size=4, max_num_batched_tokens=8)
    first = engine.add([1, 2, 3], params(max_tokens=3))
    engine.step()
    second = engine.add([4, 5, 6], params(max_tokens=2))
    drain(engine)
    found = [{request.id: num_tokens for request, num_tokens in step.generated()} for step in policy.steps]
    assert found == [{first: 1}, {second: 1}, {first: 1, second: 1}, {first: 1}]


def test_what_a_preempted_request_computes_again_is_not_new():
    policy, engine = overheard(num_blocks=8, block_size=2, max_model_len=16, prefix_caching=False)
    for index in range(2):
        engine.add([index + 1] * 5, params(max_tokens=8))
    drain(engine)
    assert any(step.preempted for step in policy.steps)
    chunks = [one for step in policy.steps for one in step.prefilled]
    assert sum(one.num_new_tokens for one in chunks) == 10 + 1 < sum(one.num_tokens for one in chunks)


def test_a_request_that_ends_while_it_waits_is_told_at_once():
    policy, engine = overheard(max_num_seqs=1)
    first, second = (engine.add([1, 2], params()) for _ in range(2))
    engine.step()
    engine.abort([second])
    notice = policy.steps[-1]
    assert notice.plan is None and [(end.request.id, end.reason) for end in notice.ended] == [(second, "abort")]
    engine.abort([first])
    engine.close()
    assert sum(len(step.ended) for step in policy.steps) == 2


def test_an_id_that_is_aborted_twice_in_one_call_ends_once():
    policy, engine = overheard()
    id_ = engine.add([1, 2], params())
    assert len(engine.abort([id_, id_])) == 1 and len(policy.steps[0].ended) == 1


class WaitsFirst(PlainScheduler):
    """Asks to wait before its first step."""

    has_waited = False

    def plan(self, view):
        if not self.has_waited:
            self.has_waited = True
            return Plan(idle_s=0.001)
        return super().plan(view)


def test_a_plan_that_only_waits_was_not_carried_out():
    policy, engine = overheard(WaitsFirst())
    engine.add([1, 2], params(max_tokens=1))
    drain(engine)
    assert [step.is_carried_out for step in policy.steps] == [False, True]


class WaitsForEver(PlainScheduler):
    def plan(self, view):
        return Plan(idle_s=0.001)


def test_a_plan_that_waited_too_long_was_not_carried_out():
    policy, engine = overheard(WaitsForEver(), stall_timeout_s=0.005)
    engine.add([1, 2], params())
    with pytest.raises(PlanError):
        for _ in range(1000):
            engine.step()
    assert [step.plan for step in policy.steps] == policy.plans
    assert not any(step.is_carried_out for step in policy.steps)


def test_a_policy_that_takes_the_place_of_another_hears_of_its_own_plans():
    first, engine = overheard()
    engine.add([1, 2], params(max_tokens=1))
    drain(engine)
    num_told, second = len(first.steps), Overheard(PlainScheduler())
    engine.scheduler = second
    engine.add([1, 2], params(max_tokens=2))
    second.check(drain(engine))
    assert len(first.steps) == num_told and [step.plan for step in second.steps] == second.plans


class FailsWhenGivenUp(PlainScheduler):
    def committed(self, step):
        if not step.is_carried_out:
            raise ValueError("odd")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_policy_that_fails_when_it_hears_of_a_lost_step_hides_no_end(overlap, monkeypatch):
    engine = fake_engine(FailsWhenGivenUp(), overlap=overlap)
    ended = []
    monkeypatch.setattr(engine.observers, "notify", lambda hook, **told: ended.append(told.get("output")))
    first = engine.add([1, 2], params(max_tokens=1))
    if overlap:
        engine.step()
    second = engine.add([1, 3], params())

    def fail(step):
        raise StepFault("model 'm' fails in forward")

    monkeypatch.setattr(engine.executor, "launch", fail)
    with pytest.raises(PluginError, match="fails in committed"):
        engine.step()
    assert {output.request_id for output in engine.pop_finished()} == {first, second}
    assert {output.request_id for output in ended if output is not None} == {first, second}


class PlansTooMuch(PlainScheduler):
    def plan(self, view):
        return Plan(prefill=[(view.waiting[0].id, 1000)])


def test_a_plan_that_broke_a_rule_was_not_carried_out():
    policy, engine = overheard(PlansTooMuch())
    engine.add([1, 2], params())
    with pytest.raises(PlanError):
        engine.step()
    assert [step.plan for step in policy.steps] == policy.plans and not policy.steps[0].is_carried_out


class SameObject(PlainScheduler):
    """Always the same plan of decodes; with overlap it gives one up when blocks run out."""

    DECODES = Plan(decode=ALL)

    def decode(self, view):
        plan = super().decode(view)
        return plan if plan.preempt else self.DECODES


@pytest.mark.parametrize("overlap", [False, True])
def test_plans_that_are_one_object_are_told_of_one_by_one(overlap):
    policy, engine = overheard(SameObject(), num_blocks=8, block_size=2, max_model_len=16, overlap=overlap)
    for index in range(3):
        engine.add([index + 1] * 3, params(max_tokens=8))
    policy.check(drain(engine))
    assert any(not step.is_carried_out for step in policy.steps) or not overlap


class FailsToRemember(PlainScheduler):
    def committed(self, step):
        raise KeyError("no such tenant")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_policy_that_fails_in_committed_is_named_and_ends_all_requests(overlap):
    engine = fake_engine(FailsToRemember(), overlap=overlap, policy="forgetful", origin="plugin 'p'")
    engine.add([1, 2], params())
    match = r"^scheduler 'forgetful' of plugin 'p' fails in committed: KeyError.*no such tenant"
    with pytest.raises(PluginError, match=match):
        while engine.has_work:
            engine.step()
    assert [output.finish_reason for output in engine.step()] == [FinishReason.ERROR] and not engine.has_work


def test_a_step_that_breaks_off_is_told_as_not_carried_out():
    policy, engine = overheard(overlap=True)
    engine.add([1, 2], params(max_tokens=9))
    engine.step()
    engine.executor.collect = lambda handle: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    policy.check(engine.step())
    assert not any(step.is_carried_out for step in policy.steps)


def test_steps_are_timed_for_a_policy_with_a_memory_only():
    policy, engine = overheard()
    engine.add([1], params(max_tokens=1))
    drain(engine)
    assert policy.steps[0].step_s == policy.steps[0].device_s == 1.0
    plain = fake_engine(PlainScheduler())
    plain.add([1], params(max_tokens=1))
    drain(plain)
    assert plain.executor.clock is None


class Configured(PlainScheduler):
    def __init__(self, config):
        pass


class Misspelt(Configured):
    def commited(self, step):
        pass


class TakesNothing(Configured):
    def committed(self):
        pass


@pytest.mark.parametrize(
    ("policy", "fault"),
    [(Misspelt, "Did you mean 'committed'"), (TakesNothing, r"its committed cannot be called with \(step\)")],
)
def test_a_class_whose_committed_would_never_be_called_is_refused(policy, fault):
    found = contract_fault("scheduler", policy, Needs())
    assert found is not None and re.search(fault, found)


def test_a_policy_may_leave_committed_out():
    assert contract_fault("scheduler", Configured, Needs()) is None


class Asks(PlainScheduler):
    def plan(self, view):
        self.served = dict(view.served_tokens("tenant"))
        return super().plan(view)


def test_tokens_are_counted_by_the_tag_that_a_policy_asks_for():
    engine = fake_engine(Asks(), block_size=4)
    shared = [1, 2, 3, 4, 5, 6]
    for tags in ({"tenant": "a"}, {"tenant": "b", "class": "x"}, None):
        engine.add(shared, params(max_tokens=3), options=RequestOptions(tags=tags))
        drain(engine)
    assert dict(engine.served.of("tenant")) == {
        "a": ServedTokens(6, 3), "b": ServedTokens(2, 3), "": ServedTokens(2, 3)
    }  # fmt: skip
    assert engine.scheduler.served["b"] == ServedTokens(2, 3)


def test_nothing_is_counted_while_nobody_asks():
    engine = fake_engine(PlainScheduler())
    engine.add([1, 2], params(), options=RequestOptions(tags={"tenant": "a"}))
    drain(engine)
    assert not engine.served.is_wanted


class Someone:
    def __init__(self, tenant):
        self.tags = {"tenant": tenant}


def test_the_values_served_longest_ago_are_forgotten():
    counts = ServedCounts()
    served = counts.of("tenant")
    for index in range(MAX_SERVED_VALUES + 2):
        counts.add([], [Someone(str(index)), Someone("0")])
    assert len(served) == MAX_SERVED_VALUES and "1" not in served and served["0"].generated == MAX_SERVED_VALUES + 3
