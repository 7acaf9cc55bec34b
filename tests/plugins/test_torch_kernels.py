"""What is particular to the torch kernels: exactness in float32, reading in place, and work done once a step.

test_torch_kernels_conform.py holds them to the contract.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, QKNorm, Rope
from hookline.core.testing.batches import Row, make_batch, random_cache, scatter_rows
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.plugins.kernels.torch_reference import TorchKernels

NUM_BLOCKS, SIZE, KV_HEADS, HEAD_DIM = 150, 8, 2, 32
EXACT = 1e-5  # float32 against float64, values around one


def spec_of(groups: int = 2) -> AttentionSpec:
    place = (torch.device("cpu"), torch.float32)
    return AttentionSpec(groups * KV_HEADS, KV_HEADS, HEAD_DIM, SIZE, 64, 1024, 1024, *place)


def side_by_side(context: int, num_queries: int, first: int) -> Row:
    return Row(context, num_queries, tuple(range(first, first - (-context // SIZE))))


def attend(spec: AttentionSpec, batch: Batch, cache: Tensor, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
    kernels = TorchKernels(None, spec)
    kernels.prepare(batch)
    return kernels.attend(queries(spec, batch), cache[:, 1], batch, form)


def queries(spec: AttentionSpec, batch: Batch) -> Tensor:
    shape = (batch.num_tokens, spec.num_heads, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def exact(spec: AttentionSpec, batch: Batch, cache: Tensor, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
    plain = PlainKernels(None, replace(spec, dtype=torch.float64))
    return plain.attend(queries(spec, batch).double(), cache[:, 1].double(), batch, form).float()


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_float32_attention_is_within_1e_5_of_float64(groups: int) -> None:
    spec = spec_of(groups)
    lengths = [(1, 1), (9, 1), (40, 1), (17, 17), (33, 9), (8, 8), (64, 1)]
    batch = make_batch(scatter_rows(lengths, SIZE, NUM_BLOCKS, 0), spec, num_decodes=3)
    cache = random_cache(spec, NUM_BLOCKS, seed=1, num_layers=2)
    torch.testing.assert_close(attend(spec, batch, cache), exact(spec, batch, cache), rtol=0, atol=EXACT)


@pytest.mark.parametrize(("context", "num_queries"), [(1, 1), (8, 1), (21, 1), (21, 21), (21, 4)])
def test_a_sequence_in_adjacent_blocks_is_read_in_place_with_the_same_result(context: int, num_queries: int) -> None:
    spec, cache = spec_of(), random_cache(spec_of(), NUM_BLOCKS, seed=1, num_layers=2)
    row = side_by_side(context, num_queries, first=5)
    moved = replace(row, blocks=tuple(80 - 3 * index for index in range(len(row.blocks))))
    for block, elsewhere in zip(row.blocks, moved.blocks, strict=True):
        cache[:, :, elsewhere] = cache[:, :, block]
    decodes = int(num_queries == 1)
    in_place = attend(spec, make_batch([row], spec, num_decodes=decodes), cache)
    gathered = attend(spec, make_batch([moved], spec, num_decodes=decodes), cache)
    torch.testing.assert_close(in_place, gathered, rtol=0, atol=1e-6)


@pytest.mark.parametrize("left_over", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [None, 6])
def test_what_overflowed_in_the_request_that_had_a_block_before_is_not_seen(
    left_over: float, window: int | None
) -> None:
    spec, lengths = spec_of(), [(5, 1), (12, 1), (3, 1), (21, 1)]
    rows = scatter_rows(lengths, SIZE, NUM_BLOCKS, 0)
    batch = replace(make_batch(rows, spec, num_decodes=4), window=window)
    clean = random_cache(spec, NUM_BLOCKS, seed=1, num_layers=2)
    dirty = clean.clone()
    for row in rows:
        dirty[:, :, row.blocks[-1], row.context % SIZE :] = left_over
    if window is not None:
        dirty[:, :, rows[-1].blocks[1], :7] = left_over  # of 21 tokens 15 lie before the window
    expected = attend(spec, batch, clean)
    torch.testing.assert_close(attend(spec, batch, dirty), expected, rtol=0, atol=0)


def test_decodes_of_very_different_lengths_come_back_in_their_order() -> None:
    spec = spec_of()
    lengths = [(5, 1), (400, 1), (12, 1), (380, 1), (90, 1), (3, 1), (7, 7)]
    rows = [side_by_side(context, count, first=10 * index) for index, (context, count) in enumerate(lengths)]
    batch = make_batch(rows, spec, num_decodes=6)
    cache = random_cache(spec, NUM_BLOCKS, seed=1, num_layers=2)
    torch.testing.assert_close(attend(spec, batch, cache), exact(spec, batch, cache), rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "form", [PLAIN_ATTENTION, AttentionForm(0.3, 2.0, torch.linspace(-2, 3, 4))], ids=["plain", "all"]
)
@pytest.mark.parametrize("window", [1, SIZE, 11, 500])
def test_a_window_reads_nothing_of_the_blocks_before_it(window: int, form: AttentionForm) -> None:
    spec, no_block = spec_of(), -1
    lengths = [(5, 1), (400, 1), (12, 1), (380, 1), (9, 9), (60, 7), (1, 1)]
    batch = make_batch(scatter_rows(lengths, SIZE, NUM_BLOCKS, 0), spec, num_decodes=4)
    batch.window = window
    cache = random_cache(spec, NUM_BLOCKS, seed=1, num_layers=2)
    expected = exact(spec, batch, cache, form)
    for row, (context, num_queries) in enumerate(lengths):
        batch.block_table_BM[row, : max(0, context - num_queries - window + 1) // SIZE] = no_block
    torch.testing.assert_close(attend(spec, batch, cache, form), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("shape", [(1, 256), (7, 100), (3, 5, 64)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_equals_the_one_of_torch(shape: tuple[int, ...], eps: float) -> None:
    kernels, x_TD = TorchKernels(None, spec_of()), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight_D = torch.linspace(0.5, 2, shape[-1])
    expected = functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    torch.testing.assert_close(kernels.rms_norm(x_TD, weight_D, eps), expected, rtol=0, atol=EXACT)


def test_each_eps_is_applied_as_given_by_the_same_kernels() -> None:
    kernels, x_TD, one_D = TorchKernels(None, spec_of()), torch.full((1, 4), 1e-3), torch.ones(4)
    small, large = kernels.rms_norm(x_TD, one_D, 1e-6), kernels.rms_norm(x_TD, one_D, 1.0)
    torch.testing.assert_close(small, torch.full((1, 4), 0.5**0.5))
    torch.testing.assert_close(large, torch.full((1, 4), 1e-3 * (1 / (1 + 1e-6)) ** 0.5))


def test_layers_with_one_rope_share_the_rows_of_a_step_and_other_ropes_have_their_own() -> None:
    spec = spec_of()
    batch = make_batch([side_by_side(6, 6, first=0)], spec, num_decodes=0)
    kernels, plain = TorchKernels(None, spec), PlainKernels(None, spec)
    kernels.prepare(batch)
    cache = torch.zeros(2, 2, NUM_BLOCKS + 1, SIZE, KV_HEADS, HEAD_DIM)
    qkv_TC = torch.randn(6, (spec.num_heads + 2 * KV_HEADS) * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    for layer, base in enumerate((10.0, 1000.0)):
        rope, norm = rope_of(base), QKNorm(torch.ones(HEAD_DIM) * 2, torch.ones(HEAD_DIM) * 3, 1e-6)
        expected_cache = torch.zeros_like(cache[:, layer])
        expected = plain.qk_norm_rope_write(qkv_TC.clone(), expected_cache, batch, rope, norm)
        for _ in range(2):
            actual = kernels.qk_norm_rope_write(qkv_TC.clone(), cache[:, layer], batch, rope, norm)
            torch.testing.assert_close(actual, expected, rtol=0, atol=EXACT)
        torch.testing.assert_close(cache[:, layer], expected_cache, rtol=0, atol=EXACT)


def rope_of(base: float) -> Rope:
    angle_PF = torch.outer(torch.arange(64.0), base ** -torch.linspace(0, 1, HEAD_DIM // 2))
    return Rope(torch.cat((angle_PF.cos(), angle_PF.sin()), -1))


def test_in_batch_invariant_mode_what_lies_before_a_window_may_be_nan():
    sizes = AttentionSpec(2, 1, 16, 16, 8, 64, 256, torch.device("cpu"), torch.float32, batch_invariant=True)
    kernels, kv_2NSKE = TorchKernels(None, sizes), random_cache(sizes, 5, seed=0)[:, 0]
    kv_2NSKE[:, 0] = torch.nan
    batch = replace(make_batch([Row(70, 9, (0, 1, 2, 3, 4))], sizes, num_decodes=0), window=20)
    kernels.prepare(batch)
    assert kernels.attend(torch.ones(9, 2, 16), kv_2NSKE, batch).isfinite().all()
