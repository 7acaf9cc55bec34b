"""Decodes over latents, whose contexts are cut into more parts than a small card's are."""

from __future__ import annotations

import pytest
import torch

from hookline.core.contracts import AttentionForm, AttentionSpec, Rope
from hookline.core.testing.batches import make_batch, random_cache, scatter_rows
from hookline.core.testing.kernels_suite.cases import exact, with_window
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.plugins.kernels.attention.triton_forms import Scoring
from hookline.plugins.kernels.attention.triton_latent_decode import (
    PARTS_OF_NEWEST,
    LatentDecodeTiling,
    LatentScratch,
    latent_decode_attention,
)

HEADS, ROTATED, LATENT, BLOCK_SIZE, NUM_BLOCKS = 4, 16, 40, 16, 40
LENGTHS = ((1, 1), (17, 1), (300, 1))


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("parts", [1, 2, PARTS_OF_NEWEST, 32])
def test_every_number_of_parts_attends_to_the_newest_key_once(parts: int, window: int | None) -> None:
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=1, head_dim=ROTATED + LATENT, value_dim=LATENT, block_size=BLOCK_SIZE,
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=320, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    rows = scatter_rows(list(LENGTHS), BLOCK_SIZE, NUM_BLOCKS, seed=1)
    batch = make_batch(rows, spec, num_decodes=len(rows))
    batch = batch if window is None else with_window(batch, rows, spec, window, scratch=NUM_BLOCKS)
    generator = torch.Generator().manual_seed(2)
    qk_TC = torch.randn(len(rows), (HEADS + 1) * spec.head_dim, generator=generator)
    rope = Rope(torch.rand(spec.max_model_len, ROTATED, generator=generator) * 2 - 1)
    form = AttentionForm(scale=0.3, sinks_H=torch.linspace(-1, 2, HEADS))
    written, out_THF = random_cache(spec, NUM_BLOCKS, seed=3)[:, 0], torch.empty(len(rows), HEADS, LATENT)
    kept = written.double()
    expected = PlainKernels(None, exact(spec)).qkv_attend(qk_TC.double(), kept, batch, rope, None, form)
    scratch = LatentScratch(torch.empty(parts * len(rows) * HEADS, LATENT), torch.empty(parts * len(rows) * HEADS, 2))
    for left in (scratch.partial_XF, scratch.stats_X2, out_THF):
        left.fill_(torch.nan)
    latent_decode_attention(
        qk_TC.view(len(rows), HEADS + 1, -1), written, batch.block_table_BM, batch.context_lens_B, len(rows),
        Scoring.of(1.0, form), out_THF, LatentDecodeTiling(HEADS, 16, 4, 1), parts, scratch, window, rope,
    )  # fmt: skip
    torch.testing.assert_close(out_THF.double(), expected, rtol=0, atol=1e-5)  # sums of 300 numbers in float32
    torch.testing.assert_close(written.double(), kept, rtol=0, atol=1e-6)
