"""Decodes over latents, whose contexts are cut into more parts than a small card's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, Rope
from hookline.core.testing.batches import make_batch, random_cache, scatter_rows
from hookline.core.testing.kernels_suite.cases import exact, with_window
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.plugins.kernels.attention import triton_latent_decode
from hookline.plugins.kernels.attention.triton_forms import Scoring
from hookline.plugins.kernels.attention.triton_latent_decode import (
    PARTS_OF_NEWEST,
    LatentDecodeTiling,
    LatentScratch,
    latent_decode_attention,
)
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_latent_backend import LatentTritonKernels

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


@pytest.mark.parametrize("heads", [8, 16, 128])
def test_steps_to_compile_have_each_variant_that_any_number_of_decodes_takes(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[object] = set()

    class Launches:
        """Keeps the constants of each launch in place of it."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *given, **constants: seen.add((self.name, *sorted(constants.items())))

    for name in ("_latent_decode_kernel", "_merge_kernel"):
        monkeypatch.setattr(triton_latent_decode, name, Launches(name))
    monkeypatch.setattr(Card, "of", lambda device: Card(132, 232448, 9))
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_dim=576, value_dim=512, block_size=16, max_num_seqs=300,
        max_num_batched_tokens=512, max_model_len=4096, device=torch.device("meta"), dtype=torch.bfloat16,
    )  # fmt: skip
    kernels = LatentTritonKernels(None, spec)
    cache, rope = torch.empty(1, 8, 16, 1, 576, device="meta"), Rope(torch.empty(4096, 64, device="meta"))

    def variants(rows: int, *, alone: bool) -> set[object]:
        seen.clear()
        kernels._attend_decodes(
            torch.empty(rows, heads + alone, 576, device="meta"), cache, _decodes(rows), PLAIN_ATTENTION,
            torch.empty(rows, heads, 512, device="meta"), rope if alone else None,
        )  # fmt: skip
        return set(seen)

    shapes = kernels.step_shapes()
    compiled = set().union(*(variants(shape.num_decodes, alone=not shape.num_tokens) for shape in shapes))
    counts = range(1, spec.max_num_seqs + 1)
    assert set().union(*(variants(rows, alone=alone) for rows in counts for alone in (False, True))) == compiled


def _decodes(rows: int) -> Batch:
    lens_B = torch.ones(rows, dtype=torch.int32)
    return Batch(lens_B, lens_B, lens_B, lens_B, lens_B, lens_B[:, None], rows, 1, 1, None)
