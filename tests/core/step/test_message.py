"""The message of a step: packing loses nothing, whatever the sections' lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.core.step.message import HEADER, SECTIONS, Step, pack, unpack
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
