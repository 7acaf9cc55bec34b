"""Steps cut into micro-batches: nothing is lost or twice, and the parts are even."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.core.step.message import ALONG, READ_WIDTH, Axis, Step
from hookline.core.step.micro_batches import cut, joined


def ints(*values):
    return np.array(values, dtype=np.int64)


def step_of(num_decodes, lens, **sections):
    lens = np.array(lens, dtype=np.int64)
    rows = np.arange(num_decodes + len(lens))
    return Step(
        decode_rows=rows[:num_decodes],
        chunk_rows=rows[num_decodes:],
        chunk_starts=lens * 2,
        chunk_lens=lens,
        token_ids_T=np.arange(lens.sum()) + 1000,
        max_context_len=99,
        **sections,
    )


@pytest.mark.parametrize(
    ("num_decodes", "lens", "most", "sizes"),
    [
        (1, [], 4, [1]),
        (0, [50], 4, [50]),
        (7, [], 2, [3, 4]),
        (8, [], 3, [2, 3, 3]),
        (0, [10, 10, 10, 10], 2, [20, 20]),
        (0, [1000, 1, 1], 3, [1000, 2]),
        (4, [10], 2, [2, 12]),
        (1, [10], 2, [10, 1]),
    ],
)
def test_decodes_are_cut_evenly_and_chunks_dealt_out_whole(num_decodes, lens, most, sizes):
    assert [part.step.num_tokens for part in cut(step_of(num_decodes, lens), most)] == sizes


@given(st.data())
def test_every_row_token_draw_mask_and_read_chunk_is_in_one_part_under_its_own_place(data):
    num_decodes = data.draw(st.integers(0, 9))
    lens = data.draw(st.lists(st.integers(1, 20), min_size=0 if num_decodes else 1, max_size=6))
    sampled = np.array([index for index in range(len(lens)) if data.draw(st.booleans())], dtype=np.int64)
    read = np.array([index for index in range(len(lens)) if data.draw(st.booleans())], dtype=np.int64)
    num_draws = num_decodes + len(sampled)
    masked = np.array([draw for draw in range(num_draws) if data.draw(st.booleans())], dtype=np.int64)
    step = step_of(
        num_decodes,
        lens,
        sampled_chunks=sampled,
        reads=np.array([[index, 7, index + 50, 0] for index in read], dtype=np.int64).reshape(-1),
        read_lens=np.array([lens[index] for index in read], dtype=np.int64),
        read_values=np.concatenate([ints(), *(np.full(lens[index], index) for index in read)]),
        late_draws=masked,
        forbidden_draws=masked,
        forbidden_tokens=masked + 500,
        admit_rows=ints(3, 4),
        num_logprobs=2,
    )
    parts = cut(step, data.draw(st.integers(1, 5)))
    rows = np.concatenate([step.decode_rows, step.chunk_rows[sampled]])
    found_rows, found_masks, found_tokens, results, found_read = [], [], [], [], []
    tokens, places = (
        np.concatenate([-1 - step.decode_rows, step.token_ids_T]),
        [part.places(Axis.TOKEN) for part in parts],
    )
    assert sorted(np.concatenate(places)) == list(range(len(tokens)))
    for part, own in zip(parts, places, strict=True):
        assert [*(-1 - part.step.decode_rows), *part.step.token_ids_T] == tokens[own].tolist()
    for part in parts:
        one = part.step
        assert one.num_tokens and one.num_logprobs == 2 and one.max_context_len == 99
        assert len(one.token_ids_T) == one.chunk_lens.sum() and len(one.read_values) == one.read_lens.sum()
        found_rows += [*one.decode_rows, *one.chunk_rows]
        found_tokens += one.token_ids_T.tolist()
        draws = np.concatenate([one.decode_rows, one.chunk_rows[one.sampled_chunks]])
        assert rows[part.places(Axis.DRAW)].tolist() == draws.tolist()
        assert draws[one.late_draws].tolist() == rows[masked[part.places(Axis.LATE)]].tolist()
        assert draws[one.forbidden_draws].tolist() == rows[one.forbidden_tokens - 500].tolist()
        own = one.reads.reshape(-1, READ_WIDTH)[:, 0]
        assert np.repeat(one.chunk_rows[own], one.read_lens).tolist() == (num_decodes + one.read_values).tolist()
        for index, reader, flags, _ in one.reads.reshape(-1, READ_WIDTH):
            assert (reader, one.chunk_rows[index]) == (7, num_decodes + flags - 50)
            found_read.append(flags - 50)
        found_masks += part.places(Axis.LATE).tolist()
        results.append(part.places(Axis.DRAW)[:, None] + np.zeros((1, 3), dtype=np.int64))
    assert sorted(found_rows) == list(range(num_decodes + len(lens))) and len(parts) <= len(found_rows)
    assert found_read == read.tolist()
    assert found_tokens == step.token_ids_T.tolist() and sorted(found_masks) == list(range(len(masked)))
    assert joined(parts, results)[:, 0].tolist() == list(range(num_draws))
    assert [len(part.step.admit_rows) for part in parts] == [2] + [0] * (len(parts) - 1)
    assert all(
        not len(getattr(part.step, name))
        for part in parts[1:]
        for name, along in ALONG.items()
        if along.axis is Axis.STEP
    )
