"""Operations on arrays of int64, against numpy's own."""

import numpy as np
import pytest

from hookline.core.util.arrays import no_ints, without


@pytest.mark.parametrize("seed", range(4))
def test_entries_without_others_are_those_that_numpy_finds_in_their_order(seed):
    rng = np.random.default_rng(seed)
    entries, others = rng.permutation(40)[: 10 * seed], rng.permutation(60)[: 30 * (seed % 3)]
    assert without(entries, others).tolist() == entries[~np.isin(entries, others)].tolist()
    assert without(entries, no_ints()).tolist() == entries.tolist()
