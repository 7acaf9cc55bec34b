"""The message of a step: packing loses nothing, whatever the sections' lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core.dispatch import float_bits
from core.step import SECTIONS, Step, pack, unpack

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(
    st.fixed_dictionaries({name: st.lists(INT64, max_size=5) for name in SECTIONS}),
    st.integers(0, 2**40),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_unpacking_gives_back_what_was_packed(sections, max_context_len, all_greedy, shared_len):
    arrays = {name: np.array(values, dtype=np.int64) for name, values in sections.items()}
    step = unpack(pack(Step(**arrays, max_context_len=max_context_len, all_greedy=all_greedy, shared_len=shared_len)))
    assert {name: getattr(step, name).tolist() for name in SECTIONS} == sections
    assert (step.max_context_len, step.all_greedy, step.shared_len) == (max_context_len, all_greedy, shared_len)


def test_temperatures_travel_as_their_bits():
    assert float_bits([0.0, 0.6]).astype(np.int32).view(np.float32).tolist() == [0.0, np.float32(0.6)]
