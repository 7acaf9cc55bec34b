"""Counts and tokens of running requests in arrays: moving in and out, committing, and whose token may be the last."""

import numpy as np

from hookline.core.requests.request import Request
from hookline.core.requests.running_table import RunningTable
from hookline.core.sampling_params import SamplingParams


def request(id, prompt=(5, 6, 7), max_tokens=4, stop_ids=(), min_tokens=0):
    tokens = np.array(prompt, dtype=np.int32)
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    return Request(id, tokens, params, max_tokens=max_tokens, block_size=4, seed=0, stop_ids=frozenset(stop_ids))


def running(*requests, num_entries=4):
    """RunningTable in which these requests have each sampled a token that is not known yet."""
    table = RunningTable(num_entries, max_len=16)
    for one in requests:
        table.take(one)
        one.num_tokens += 1
    return table


def entries_of(*requests):
    return np.array([one.entry for one in requests])


def test_counts_and_tokens_survive_a_stay_in_an_entry():
    one, other = request(0), request(1, prompt=(9, 9))
    table = running(one, other)
    table.num_computed_tokens_S[entries_of(other)] += 2
    table.commit(table.sampled(entries_of(one, other)), np.array([30, 31]))
    for leaver in one, other:
        table.leave(leaver)
    table.take(request(2, prompt=[1] * 12))
    assert one.tokens[:4].tolist() == [5, 6, 7, 30] and other.tokens[:3].tolist() == [9, 9, 31]
    assert (one.id, one.num_tokens, one.num_known_tokens, one.num_computed_tokens) == (0, 4, 4, 0)
    assert (other.id, other.num_tokens, other.num_known_tokens, other.num_computed_tokens) == (1, 3, 3, 2)


def test_a_token_for_somebody_who_left_is_dropped_even_if_the_entry_is_taken_again():
    one, other, third = request(0), request(1), request(2)
    table = running(one, other, num_entries=2)
    sampled = table.sampled(entries_of(one, other))
    table.leave(one)
    table.take(third)
    here, tokens = table.commit(sampled, np.array([30, 31]))
    assert here.tolist() == [other.entry] and tokens.tolist() == [31]
    assert third.num_known_tokens == 3 and third.tokens[:3].tolist() == [5, 6, 7]


def test_a_token_to_look_at_a_request_at_its_length_or_if_anybody_here_stops_at_it():
    full, stopping, other = request(0, max_tokens=1), request(1, stop_ids=[40, 41]), request(2, stop_ids=[41])
    table = running(full, stopping, other)
    sampled = table.sampled(entries_of(full, stopping, other))
    arrived = table.commit(sampled, np.array([30, 40, 41]))
    assert table.to_look_at(*arrived).tolist() == [0, 1, 2]
    table.leave(stopping)
    assert table.to_look_at(*arrived).tolist() == [0, 2]
    table.leave(other)
    assert table.to_look_at(*arrived).tolist() == [0]


def test_requests_with_min_tokens_are_counted_while_they_are_here():
    plain, delaying = request(0, stop_ids=[40]), request(1, stop_ids=[40], min_tokens=2)
    table = running(plain)
    assert table.num_delaying == 0
    table.take(delaying)
    table.leave(plain)
    assert table.num_delaying == 1
    table.leave(delaying)
    table.leave(delaying)
    assert table.num_delaying == 0


def test_as_many_requests_fit_as_there_are_entries_however_often_they_change():
    table = RunningTable(2, max_len=16)
    for round in range(3):
        pair = [request(2 * round), request(2 * round + 1)]
        for one in pair:
            table.take(one)
        assert [one.id for one in table.requests(entries_of(*pair))] == [one.id for one in pair]
        assert table.id_S[entries_of(*pair)].tolist() == [one.id for one in pair]
        for one in pair:
            table.leave(one)
            table.leave(one)
