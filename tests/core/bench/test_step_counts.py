"""What a step computes, counted from the steps alone."""

import numpy as np

from hookline.core.bench.step_counts import StepCounter, StepCounts
from hookline.core.step.message import Step


def rows(*values):
    return np.array(values, dtype=np.int64)


def prefill(*chunks):
    """A step of (row, first position, length)."""
    starts = rows(*(start for _, start, _ in chunks))
    lens = rows(*(length for *_, length in chunks))
    chunk_rows = rows(*(row for row, *_ in chunks))
    return Step(chunk_rows=chunk_rows, chunk_starts=starts, chunk_lens=lens, token_ids_T=np.zeros(int(lens.sum())))


def test_a_chunk_pairs_each_query_with_every_key_up_to_its_own():
    counts = StepCounter(4).count(prefill((0, 0, 3), (2, 10, 2)))
    assert counts == StepCounts(prefill_tokens=5, prefill_chunks=2, prefill_pairs=(1 + 2 + 3) + (11 + 12))


def test_a_decode_sees_its_own_token_and_all_before_it():
    counter = StepCounter(4)
    counter.count(prefill((0, 0, 3), (2, 10, 2)))
    assert counter.count(Step(decode_rows=rows(0, 2))) == StepCounts(decode_rows=2, decode_context_tokens=4 + 13)
    assert counter.count(Step(decode_rows=rows(2))).decode_context_tokens == 14


def test_shared_tokens_count_for_every_row_until_other_rows_share():
    counter = StepCounter(4)
    counter.count(prefill((0, 0, 8), (1, 0, 8), (2, 0, 8)))
    first = counter.count(Step(decode_rows=rows(0, 1, 2), shared_rows=rows(0, 1, 2), shared_len=4))
    second = counter.count(Step(decode_rows=rows(0, 1, 2), shared_len=4))
    mixed = counter.count(Step(decode_rows=rows(0, 1, 2)))
    fewer = counter.count(Step(decode_rows=rows(0, 1), shared_rows=rows(0, 1), shared_len=4))
    assert [counts.decode_shared_tokens for counts in (first, second, mixed, fewer)] == [12, 12, 0, 8]


def test_a_chunk_that_draws_several_tokens_is_a_decode_of_as_many():
    counter = StepCounter(4)
    step = prefill((0, 10, 3), (2, 0, 2))
    step.sampled_chunks, step.decode_rows = rows(0, 0, 0, 1), rows(1)
    counter.count(prefill((1, 0, 4)))
    assert counter.count(step) == StepCounts(
        prefill_tokens=2,
        prefill_chunks=1,
        prefill_pairs=1 + 2,
        decode_rows=1 + 3,
        decode_context_tokens=5 + 11 + 12 + 13,
    )


def test_rows_for_which_the_device_drafts_are_decodes_of_one_and_as_many_tokens():
    counter = StepCounter(4)
    counter.note_lengths(rows(0, 2), rows(10, 4))
    counts = counter.count(Step(drafting_rows=rows(0, 2), num_drafts=2))
    assert counts == StepCounts(decode_rows=6, decode_context_tokens=10 + 11 + 12 + 4 + 5 + 6)
