"""Slots that no query sees may hold anything: what another request left there, or is writing there now."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm
from hookline.core.testing.batches import make_batch, random_cache, scatter_rows, seen_slots
from tests.plugins.test_torch_kernels import EXACT, NUM_BLOCKS, SIZE, attend, exact, spec_of


@pytest.mark.parametrize("stale", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", [PLAIN_ATTENTION, AttentionForm(softcap=5.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("is_captured", [False, True])
def test_what_no_query_sees_may_be_nan(
    stale: float, form: AttentionForm, window: int | None, is_captured: bool
) -> None:
    spec = spec_of()
    rows = scatter_rows([(5, 1), (40, 1), (33, 1)], SIZE, NUM_BLOCKS, 0)
    filler = next(block for block in range(NUM_BLOCKS) if not any(block in row.blocks for row in rows))
    batch = replace(make_batch(rows, spec, num_decodes=3, filler=filler), window=window)
    if is_captured:
        batch = replace(batch, context_lens_host=None)
    cache = random_cache(spec, NUM_BLOCKS, seed=1, num_layers=2)
    expected = exact(spec, batch, cache, form)
    is_seen = torch.zeros(cache.shape[2] * SIZE, dtype=torch.bool)
    is_seen[seen_slots(rows, SIZE)] = True
    cache.flatten(2, 3)[:, :, ~is_seen] = stale
    torch.testing.assert_close(attend(spec, batch, cache, form), expected, rtol=0, atol=EXACT)
