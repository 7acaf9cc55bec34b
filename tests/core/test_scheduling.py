"""`core.scheduling`: what policies made of it promise beyond what the shipped ones show, which make the same moves."""

from dataclasses import replace

import pytest

from hookline.core.contracts import ALL, Joining, Plan, SchedulerView
from hookline.core.sampling_params import SamplingParams
from hookline.core.scheduling import (
    MAX_PROMPT_STEPS,
    PlanDraft,
    admit_waiting,
    continue_prompts,
    decode_running,
    decodes_are_due,
    plan_mixed,
    plan_prompts_first,
)
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.scheduler_suite import drain, look


class Made:
    """A policy of the function that plans."""

    def __init__(self, plan):
        self.plan = plan


MIXED = Made(lambda view: plan_mixed(view, 0.0))


def three_running(**limits):
    """An engine in which three requests decode and one waits."""
    engine = fake_engine(MIXED, **limits)
    for _ in range(3):
        engine.add([1, 2, 3], SamplingParams(max_tokens=8, seed=1))
    engine.step()
    engine.step()
    engine.add([4] * 20, SamplingParams(max_tokens=8, seed=1))
    return engine


@pytest.mark.parametrize(("most_tokens", "chunk"), [(None, 13), (99, 13), (10, 7), (4, 1), (3, 0), (1, 0)])
def test_a_step_of_most_tokens_leaves_no_room_rather_than_less_than_none(most_tokens, chunk):
    plan = plan_mixed(look(three_running(max_num_batched_tokens=16)), 0.0, most_tokens=most_tokens)
    assert plan.decode is ALL
    assert list(plan.prefill) == ([(3, chunk)] if chunk else [])


def after_steps_without_decode(engine, num_steps):
    return replace(look(engine), num_steps_without_decode=num_steps)


@pytest.mark.parametrize(("num_steps", "is_due"), [(0, False), (MAX_PROMPT_STEPS - 1, False), (MAX_PROMPT_STEPS, True)])
def test_decodes_that_are_due_go_before_prompts(num_steps, is_due):
    view = after_steps_without_decode(three_running(), num_steps)
    assert decodes_are_due(view) is is_due
    plan = plan_prompts_first(view, 0.0)
    assert (plan.decode is ALL, len(plan.prefill)) == ((True, 0) if is_due else (False, 1))


def test_decodes_are_due_only_while_somebody_can_decode():
    engine = three_running()
    for id_ in range(3):
        engine.abort([id_])
    view = after_steps_without_decode(engine, 99)
    assert not decodes_are_due(view)
    assert list(plan_prompts_first(view, 0.0).prefill) == [(3, 20)]


def test_prompts_fill_a_step_up_whose_decodes_were_due():
    plan = plan_mixed(after_steps_without_decode(three_running(max_num_batched_tokens=16), 99), 0.0)
    assert (plan.decode is ALL, list(plan.prefill)) == (True, [(3, 13)])


JOINING = Joining(max_decodes=3, max_prompts=1, max_prompt_tokens=20)


@pytest.mark.parametrize(
    ("step", "pays"),
    [
        ((3, 1, 20), True),
        ((1, 1, 1), True),
        ((4, 1, 20), False),
        ((3, 2, 20), False),
        ((3, 1, 21), False),
        ((0, 1, 20), False),
        ((3, 0, 0), False),
    ],
)
def test_which_steps_of_decodes_and_prompts_are_worth_it(step, pays):
    assert JOINING.pays(*step) is pays
    assert not Joining().pays(*step)


@pytest.mark.parametrize(
    ("changes", "joins"),
    [({}, True), ({"max_decodes": 2}, False), ({"max_prompts": 0}, False), ({"max_prompt_tokens": 19}, False)],
    ids=str,
)
def test_decodes_join_prompts_where_the_engine_says_that_it_pays(changes, joins):
    engine = three_running(joining=replace(JOINING, **changes))
    plan = plan_prompts_first(look(engine), 0.0)
    assert list(plan.prefill) == [(3, 20)]
    assert plan.decode == (ALL if joins else [])


@pytest.mark.parametrize(("budget", "joins"), [(23, True), (22, False)])
def test_decodes_join_within_the_token_budget_of_a_step(budget, joins):
    view = look(three_running(joining=JOINING))
    plan = plan_prompts_first(replace(view, limits=replace(view.limits, max_num_batched_tokens=budget)), 0.0)
    assert (list(plan.prefill), plan.decode is ALL) == ([(3, 20)], joins)


def test_no_request_is_preempted_to_join_prompts():
    view = look(three_running(joining=JOINING, num_blocks=8))  # three blocks are held, five go to the prompt
    assert plan_prompts_first(view, 0.0) == Plan(prefill=[(3, 20)], decode=[], preempt=[])
    assert plan_prompts_first(look(three_running(joining=JOINING, num_blocks=11)), 0.0).decode is ALL


@pytest.mark.parametrize(("max_num_seqs", "seats"), [(3, 0), (4, 1), (8, 5)])
def test_seats_are_what_running_requests_leave(max_num_seqs, seats):
    assert PlanDraft(look(three_running(max_num_seqs=max_num_seqs))).seats_left == seats


def test_a_preempted_request_gives_its_seat_back():
    engine = three_running(max_num_seqs=3)
    draft = PlanDraft(look(engine))
    draft.preempt.append(2)
    assert (draft.num_running, draft.seats_left) == (2, 1)


def running_out_of_blocks(num_blocks):
    """Three requests whose next token needs a second block of four tokens each."""
    engine = fake_engine(MIXED, num_blocks=num_blocks)
    for index in range(3):
        engine.add([index + 1] * 3, SamplingParams(max_tokens=8, seed=1))
    engine.step()
    engine.step()
    assert [request.num_tokens for request in look(engine).running] == [5, 5, 5]
    return engine


@pytest.mark.parametrize(("num_blocks", "preempted"), [(6, []), (5, [2]), (4, [2]), (3, [2, 1])])
def test_no_more_make_room_than_must_and_the_others_decode_in_the_same_step(num_blocks, preempted):
    engine = running_out_of_blocks(num_blocks)
    draft = PlanDraft(look(engine))
    decode_running(draft)
    left = [id_ for id_ in range(3) if id_ not in preempted]
    assert (draft.preempt, draft.decode) == (preempted, left if preempted else ALL)
    assert draft.tokens_left == draft.view.limits.max_num_batched_tokens - len(left)


def test_who_has_part_of_a_prompt_does_not_decode_while_others_make_room():
    plans = iter([Plan(prefill=[(0, 2), (1, 3)]), Plan(decode=[1])])
    engine = fake_engine(Made(lambda view: next(plans)), num_blocks=2)
    for count in (6, 3):
        engine.add([7] * count, SamplingParams(max_tokens=4, seed=1))
    engine.step()
    engine.step()  # now both blocks are taken, and the second request needs another one
    draft = PlanDraft(look(engine))
    decode_running(draft)
    assert (draft.preempt, draft.decode) == ([1], [])


def test_who_decodes_may_still_have_to_make_room_for_the_prompt_of_an_older_request():
    plans = iter([Plan(prefill=[(0, 4), (1, 3), (2, 3)]), Plan(decode=[1, 2])])
    engine = fake_engine(Made(lambda view: next(plans)), num_blocks=4)
    for count in (12, 3, 3):
        engine.add([count] * count, SamplingParams(max_tokens=4, seed=1))
    engine.step()
    engine.step()  # now a block is free, and the second and the third request need another one each
    plan = plan_mixed(look(engine), 0.0)
    assert (list(plan.preempt), list(plan.prefill), list(plan.decode)) == ([2, 1], [(0, 8)], [])
    engine.scheduler = MIXED
    assert len(drain(engine)) == 3


def test_nobody_is_admitted_into_the_room_that_others_had_to_make():
    engine = running_out_of_blocks(5)
    engine.add([9], SamplingParams(max_tokens=1, seed=1))
    plan = plan_mixed(look(engine), 0.0)
    assert (list(plan.preempt), list(plan.prefill), list(plan.decode)) == ([2], [], [0, 1])


def test_moves_in_another_order_are_another_policy():
    def last_come_first(view: SchedulerView) -> Plan:
        draft = PlanDraft(view)
        continue_prompts(draft)
        if not draft.preempt:
            admit_waiting(draft, reversed(view.waiting))
        if not draft.prefill:
            decode_running(draft)
        return draft.plan()

    engine = fake_engine(Made(last_come_first), max_num_seqs=1)
    ids = [engine.add([index + 1] * 3, SamplingParams(max_tokens=2, seed=0)) for index in range(4)]
    assert [output.request_id for output in drain(engine)] == ids[::-1]
