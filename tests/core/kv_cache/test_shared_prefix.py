"""Which decodes share a prefix, and when looking pays."""

import pytest

from hookline.core.kv_cache.shared_prefix import common_blocks, shared_prefix
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler

SHARED = list(range(1, 33))


def decoding(prompts, **options):
    """Requests in their first decode, with a dispatcher that looks for shared prefixes."""
    sizes = {"num_blocks": 200, "max_num_batched_tokens": 512, **options}
    engine = fake_engine(PlainScheduler(), shares_prefixes=True, **sizes)
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=9, seed=1))
    engine.step()
    return engine


@pytest.fixture(autouse=True)
def little_is_worth_it(monkeypatch):
    monkeypatch.setattr("hookline.core.kv_cache.shared_prefix.MIN_SAVED_TOKENS", 64)


def test_the_group_is_those_with_a_common_beginning_and_the_length_what_all_share():
    engine = decoding(
        [[*SHARED, 40], [*SHARED[:20], 41, 42, 43], [*SHARED, 44], [7] * 20, [*SHARED, 45], [*SHARED, 46]]
    )
    requests = list(engine.queue.running.values())
    group, num_tokens = shared_prefix(requests)
    assert [request.id for request in group] == [0, 1, 2, 4, 5]
    assert num_tokens == 20


def test_too_little_to_save_is_no_group():
    engine = decoding([[*SHARED, 40], [*SHARED, 41]])
    assert shared_prefix(list(engine.queue.running.values())) == ([], 0)


def test_one_request_shares_with_nobody():
    engine = decoding([[*SHARED, 40]])
    assert shared_prefix(list(engine.queue.running.values())) == ([], 0)


def test_every_row_has_a_token_of_its_own_behind_the_prefix():
    engine = decoding([SHARED] * 5)
    group, num_tokens = shared_prefix(list(engine.queue.running.values()))
    assert all(num_tokens < request.num_tokens for request in group)


def test_a_step_names_the_group_once_and_again_when_it_changes():
    engine = decoding([[*SHARED, 40 + index] for index in range(5)])
    engine.step()
    engine.step()
    first, second = engine.executor.steps[1:3]
    assert len(first.shared_rows) == 5 and first.shared_len == 32
    assert len(second.shared_rows) == 0 and second.shared_len == 32
    engine.abort([0])
    engine.step()
    third = engine.executor.steps[3]
    assert len(third.shared_rows) == 4 and third.shared_len == 32


def test_requests_that_are_preempted_and_admitted_into_other_rows_are_named_anew():
    """A row that the ranks still held for a member of the group would read the others' prefix in place of its own."""
    engine = decoding([[7] * 20, *([*SHARED, 40 + index] for index in range(5))], max_num_seqs=6)
    engine.step()
    assert engine.executor.steps[-1].shared_rows.tolist() == [1, 2, 3, 4, 5]
    before = {id_: request.row for id_, request in engine.queue.running.items()}
    engine.dispatcher.preempt(list(reversed(engine.queue.running.values())))
    for _ in range(2):
        engine.step()
    running = engine.queue.running
    assert list(running) == list(before) and {id_: one.row for id_, one in running.items()} != before
    step = engine.executor.steps[-1]
    assert not len(step.chunk_rows) and step.shared_len == 32
    assert step.shared_rows.tolist() == [running[id_].row for id_ in range(1, 6)]


def test_common_blocks_of_tables():
    assert common_blocks([[1, 2, 3], [1, 2], [1, 2, 9]]) == 2
    assert common_blocks([[1], [2]]) == 0
