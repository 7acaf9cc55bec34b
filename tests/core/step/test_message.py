"""The message of a step: packing loses nothing, whatever the sections' lengths."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.core.step.message import HEADER, SECTIONS, Step, pack, unpack
from hookline.core.testing.fakes.engine import check_sections
from hookline.core.util.arrays import float_bits

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.slow
@given(
    st.fixed_dictionaries({name: st.lists(INT64, max_size=5) for name in SECTIONS}),
    st.fixed_dictionaries({name: st.integers(-1, 2**62) for name in HEADER if name != "all_greedy"}),
    st.booleans(),
)
def test_unpacking_gives_back_what_was_packed(sections, numbers, all_greedy):
    arrays = {name: np.array(values, dtype=np.int64) for name, values in sections.items()}
    step = unpack(pack(Step(**arrays, **numbers, all_greedy=all_greedy)))
    assert {name: getattr(step, name).tolist() for name in SECTIONS} == sections
    assert {name: getattr(step, name) for name in HEADER} == {**numbers, "all_greedy": all_greedy}
    assert type(step.all_greedy) is bool


def test_temperatures_travel_as_their_bits():
    assert float_bits([0.0, 0.6]).astype(np.int32).view(np.float32).tolist() == [0.0, np.float32(0.6)]


CHUNKS = dict(chunk_rows=[4, 5], chunk_starts=[0, 0], chunk_lens=[2, 1], token_ids_T=[7, 8, 9], sampled_chunks=[0, 1])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (dict(), None),
        (
            dict(
                reads=[0, 0, 0, 0], read_lens=[2], read_values=[1, 2], forbidden_draws=[2, 2], forbidden_tokens=[3, 4]
            ),
            None,
        ),
        (dict(token_ids_T=[7, 8]), "token_ids_T has other entries"),
        (dict(forbidden_draws=[2], forbidden_tokens=[]), "forbidden_tokens has other entries"),
        (dict(reads=[0, 0, 0, 0], read_lens=[2], read_values=[1]), "read_values has other entries"),
        (dict(sampled_chunks=[2]), "sampled_chunks names what is not there"),
        (dict(late_draws=[-1]), "late_draws names what is not there"),
        (dict(reads=[-1, 0, 0, 0], read_lens=[0]), "reads names what is not there"),
    ],
)
def test_sections_whose_entries_do_not_fit_their_axis_are_found(sections, message):
    given = {"decode_rows": [3], **CHUNKS, **sections}
    arrays = {name: np.array(values, dtype=np.int64) for name, values in given.items()}
    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        check_sections(Step(**arrays))
