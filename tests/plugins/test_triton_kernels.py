"""The Triton kernels against plain float64 torch: poisoned outputs, poisoned cache slots, ragged lengths.

Without a GPU the kernels run under Triton's interpreter at small sizes; `gpu` tests repeat them at full size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import product as product_of

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow  # under the interpreter
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
triton = pytest.importorskip("triton")

from hookline.core.contracts import (  # noqa: E402
    AttentionSpec,
    Batch,
    QKNorm,
    Rope,
)
from hookline.core.testing.batches import make_batch, scatter_rows  # noqa: E402
from hookline.core.testing.plain_kernels import PlainKernels  # noqa: E402
from hookline.plugins.kernels import triton_attention, triton_backend  # noqa: E402
from hookline.plugins.kernels.attention.triton_prefill import (  # noqa: E402
    prefill_tiling,
    query_tiles,
    query_tiles_on_device,
)
from hookline.plugins.kernels.attention.triton_schedule import (  # noqa: E402
    MAX_PROGRAMS_PER_SM,
    MIN_ITEM_TOKENS,
    DecodeScratch,
    DecodeTiling,
    decode_tiling,
    max_num_items,
    schedule_decode,
    target_items,
)
from hookline.plugins.kernels.norms import triton_gates, triton_norms, triton_rotary  # noqa: E402
from hookline.plugins.kernels.products import triton_product, triton_thin  # noqa: E402
from hookline.plugins.kernels.products.triton_product import (  # noqa: E402
    MOST_WIDTH,
    Kind,
    fitting_tiling,
    product,
    product_tiling,
)
from hookline.plugins.kernels.torch_reference import TorchKernels  # noqa: E402
from hookline.plugins.kernels.triton_backend import TritonKernels  # noqa: E402
from hookline.plugins.kernels.triton_card import Card  # noqa: E402
from hookline.plugins.kernels.triton_launch import cdiv, fuses_decode, next_power_of_2  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")

RELATIVE_ERROR = {
    torch.float32: 2e-6,  # a few roundings of 6e-8 that grow with the root of the number of terms
    torch.float16: 1e-3,  # weights and output are rounded once each, 2^-11 = 5e-4 at most
    torch.bfloat16: 8e-3,  # the same at 2^-8 = 4e-3
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """|out - expected| / |expected|; NaN counts as infinite."""
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    return error if error == error else float("inf")


@dataclass
class Case:
    """A batch over a poisoned cache, and what attention must give."""

    batch: Batch
    spec: AttentionSpec
    kv: torch.Tensor
    q: torch.Tensor
    expected: torch.Tensor


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal bottom-right attention of one request in float64: (L, H, E) over (N, K, E)."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
    visible = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def make_case(
    query_lens: list[int],
    context_lens: list[int],
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    group: int = 2,
    head_dim: int = 64,
    num_kv_heads: int = 2,
    shared_blocks: int = 0,
    sharers: int | None = None,
) -> Case:
    """Requests with these lengths; the first `sharers` (default all) begin with the same `shared_blocks` blocks."""
    torch.manual_seed(sum(context_lens) + block_size + group)
    rows, width = len(context_lens), -(-max(context_lens) // block_size)
    num_blocks = rows * width + 1
    table = (torch.randperm(num_blocks - 1)[: rows * width] + 1).view(rows, width).int()
    table[:sharers, :shared_blocks] = table[0, :shared_blocks]
    kv = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    for row, length in enumerate(context_lens):
        begin = shared_blocks * block_size if 0 < row < (sharers or rows) else 0
        position = torch.arange(begin, length)
        content = torch.randn(2, len(position), num_kv_heads, head_dim)
        kv[:, table[row, position // block_size].long(), position % block_size] = content.to(dtype)
    num_heads = num_kv_heads * group
    q = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    kv, q, table = kv.to(DEVICE), q.to(DEVICE), table.to(DEVICE)
    expected = []
    for row, length in enumerate(context_lens):
        position = torch.arange(length, device=DEVICE)
        k, v = kv[:, table[row, position // block_size].long(), position % block_size]
        expected.append(reference(q[starts[row] : starts[row + 1]], k, v))
    num_decodes = next((row for row, length in enumerate(query_lens) if length != 1), rows)
    context = torch.tensor(context_lens, dtype=torch.int32)
    spec = AttentionSpec(
        num_heads, num_kv_heads, head_dim, block_size, max(rows, 4), 1 << 14, max(context_lens), DEVICE, dtype
    )
    nothing = torch.zeros(len(q), dtype=torch.int64, device=DEVICE)
    batch = Batch(
        token_ids_T=nothing, positions_T=nothing, slot_mapping_T=nothing,
        query_starts_B1=torch.from_numpy(starts).to(DEVICE), context_lens_B=context.to(DEVICE),
        block_table_BM=table, num_decodes=num_decodes, max_query_len=max(query_lens),
        max_context_len=max(context_lens), query_starts_host=starts, context_lens_host=context.numpy(),
    )  # fmt: skip
    if shared_blocks:
        shared_lens = torch.zeros(rows, dtype=torch.int32)
        shared_lens[:sharers] = shared_blocks * block_size
        batch.shared_lens_B = shared_lens.to(DEVICE)
    return Case(batch, spec, kv, q, torch.cat(expected))


class PoisonedEmpty:
    """torch.empty that fills floating-point tensors with NaN, so that what a kernel leaves out shows."""

    def __init__(self, empty):
        self.empty = empty

    def __call__(self, *args, **kwargs):
        out = self.empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-123456)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    monkeypatch.setattr(torch, "empty", PoisonedEmpty(torch.empty))


def attend(case: Case, kernels: TritonKernels | None = None) -> torch.Tensor:
    kernels = kernels or TritonKernels(None, case.spec)
    kernels.prepare(case.batch)
    return kernels.attend(case.q, case.kv, case.batch)


def assert_attends(case: Case) -> None:
    assert relative_error(attend(case), case.expected) < RELATIVE_ERROR[case.spec.dtype]


def plain_items(lens, shared, num_items: int, target: int) -> list[list[int]]:
    """What `schedule_decode` writes at tiles of 32 tokens, in plain Python; shared: where each row's items begin."""
    tiles = [-(-(length - begin) // 32) for length, begin in zip(lens, shared, strict=True)]
    tiles_an_item = max(-(-sum(tiles) // target), 2)
    while sum(-(-of_row // tiles_an_item) for of_row in tiles) > num_items:
        tiles_an_item += -(-tiles_an_item // 4)
    even = [-(-of_row // max(-(-of_row // tiles_an_item), 1)) for of_row in tiles]
    items: list[list[int]] = []
    for row in sorted(range(len(lens)), key=lambda row: (-even[row], row)):
        begins = range(shared[row], lens[row], max(even[row], 1) * 32)
        first = len(items)
        items += [[row, at, min(at + even[row] * 32, lens[row]), first, len(begins)] for at in begins]
    return items


def check_items(
    lens: list[int], shared: list[int], num_kv_heads: int, programs_per_sm: int, window: int | None = None
) -> int:
    """Hold the work list to the plain one, its unused end included; returns how many items it has."""
    scratch = DecodeScratch.make(len(lens), 2 * num_kv_heads, num_kv_heads, 64, DEVICE)
    scratch.items_W8.fill_(-7)
    lens_B, shared_B = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lens, shared))
    tiling = DecodeTiling(32, 1, 1, programs_per_sm)
    num_items = schedule_decode(
        lens_B, scratch, num_kv_heads, tiling, shared_B if any(shared) else None, 32, 4, window
    )  # fmt: skip
    if window is not None:
        seen = [max(0, length - window) for length in lens]
        assert all(item[5] == seen[item[0]] for item in scratch.items_W8[:num_items].tolist() if item[0] >= 0)
        shared = [at // 32 * 32 for at in seen]
    target = target_items(num_kv_heads, scratch.card.num_sms, programs_per_sm)
    expected = plain_items(lens, shared, num_items, target)
    assert len(expected) <= num_items
    items = scratch.items_W8[:, :5].tolist()
    assert items[: len(expected)] == expected
    assert all(item[0] == -1 for item in items[len(expected) : num_items])
    assert all(item == [-7] * 5 for item in items[num_items:])
    covered = [sum(stop - begin for of, begin, stop, *_ in expected if of == row) for row in range(len(lens))]
    assert covered == [length - begin for length, begin in zip(lens, shared, strict=True)]
    assert [stop - begin > 0 for _, begin, stop, *_ in expected] == [True] * len(expected)
    return len(expected)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("programs_per_sm", [1, 4, 8])
def test_work_items_cover_every_context_exactly_once_and_long_ones_come_first(seed, programs_per_sm):
    generator = np.random.default_rng(seed)
    lens = generator.integers(1, [2, 100, 3000][seed % 3], size=int(generator.integers(1, 60)))
    shared = 64 * generator.integers(0, 2, size=len(lens)) * (lens > 64)
    check_items(lens.tolist(), shared.tolist(), 2, programs_per_sm)
    check_items(lens.tolist(), [0] * len(lens), 1, programs_per_sm)


@pytest.mark.parametrize("window", [1, 32, 33, 500])
def test_work_items_within_a_window_begin_with_its_first_tile(window):
    lens = [1, 32, 33, 2000, 64, 65, 500, 531, 532]
    num_used = check_items(lens, [0] * len(lens), 2, 4, window)
    assert num_used < 20 or window == 500


@pytest.mark.parametrize(
    "lens",
    [
        [1], [32] * 32, [33] * 33, [7] * 40 + [900], [0, 5, 0, 70, 0], [64, 65] * 20,
        list(range(1, 1100 if GPU else 140)),
    ],
    ids=lambda lens: f"{len(lens)}x{max(lens)}",
)  # fmt: skip
def test_work_items_of_equal_empty_and_very_many_rows(lens):
    check_items(lens, [0] * len(lens), 2, 4)


def test_work_items_grow_until_they_fit_the_list():
    lens = [65 + 64 * (row % 3) for row in range(12)]
    assert 4 * 8 // 2 == max_num_items(12, 2, 4, 8) < sum(-(-length // 64) for length in lens)
    num_items = check_items(lens, [0] * 12, 2, 8)
    assert num_items <= max_num_items(12, 2, Card.of(DEVICE).num_sms, 8)


def test_query_tiles_cover_every_prefill_token_once_longest_context_first():
    starts, contexts = np.array([0, 1, 2, 72, 75, 205]), np.array([9, 500, 70, 1000, 130])
    tiles = query_tiles(starts, contexts, first_row=2, tokens_a_tile=64)
    assert tiles.tolist() == [[3, 0], [4, 128], [2, 64], [4, 64], [2, 0], [4, 0]]


@pytest.mark.parametrize("seed", range(4))
def test_query_tiles_of_the_device_are_those_of_the_host(seed):
    generator = np.random.default_rng(seed)
    query_lens = generator.integers(0, 2, size=17) * generator.integers(1, 90, size=17)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    first_row, num_tokens = seed, int(query_lens[seed:].sum())
    tiles = query_tiles_on_device(torch.from_numpy(starts).to(DEVICE), num_tokens, first_row, 32).cpu()
    used = tiles[tiles[:, 0] >= 0].tolist()
    assert sorted(used) == sorted(query_tiles(starts, query_lens, first_row, 32).tolist())
    assert (tiles[len(used) :, 0] == -1).all()


def without_host_lengths(case: Case) -> Case:
    """The same as the batch of a captured prefill step."""
    case.batch.query_starts_host = case.batch.context_lens_host = None
    case.batch.max_query_len = case.batch.num_tokens
    case.batch.max_context_len = case.batch.block_table_BM.shape[1] * case.spec.block_size
    return case


def test_prefill_of_unknown_lengths_with_rows_of_no_queries_equals_reference():
    assert_attends(without_host_lengths(make_case([70, 2, 1, 33, 0, 0, 5], [70, 130, 100, 33, 1, 1, 5])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_decode_equals_reference_over_dtypes_and_block_sizes(dtype, block_size):
    assert_attends(make_case([1] * 4, [1, 37, 300, 129], dtype, block_size))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_decode_equals_reference_over_groups_and_head_dims(group, head_dim):
    assert_attends(make_case([1] * 3, [5, 64, 200], group=group, head_dim=head_dim))


@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize("shared_blocks", [0, 1])
def test_decode_in_tiles_of_64_tokens_equals_reference(block_size, shared_blocks, monkeypatch):
    monkeypatch.setattr(triton_attention, "decode_tiling", lambda *_: DecodeTiling(64, 4, 2, 2))
    assert_attends(make_case([1] * 4, [65, 90, 300, 129], torch.float16, block_size, shared_blocks=shared_blocks))


@pytest.mark.parametrize("card", [Card(132, 227 << 10), Card(128, 99 << 10, 8)], ids=["H100", "RTX 4090"])
def test_every_cut_of_decodes_fits_the_work_list_and_the_card(card):
    for head_dim in (64, 128, 256):
        for num_kv_heads in (1, 2, 4, 8, 16):
            room = max_num_items(512, num_kv_heads, card.num_sms, MAX_PROGRAMS_PER_SM)
            for rows in range(1, 513):
                tiling = decode_tiling(rows, num_kv_heads, head_dim, torch.bfloat16, card)
                assert max_num_items(rows, num_kv_heads, card.num_sms, tiling.programs_per_sm) <= room
                under_way = (tiling.num_stages - 1) * 2 * tiling.tile * head_dim * 2
                assert (
                    under_way + (8 << 10) <= card.shared_memory_bytes
                )  # besides them queries and what is left of a row


@pytest.mark.parametrize("block_size", [48, 80])
def test_block_sizes_that_are_no_power_of_two_work(block_size):
    assert_attends(make_case([1, 1, 70, 3], [100, 7, 70, 150], block_size=block_size))


@pytest.mark.parametrize("head_dim", [80, 192, 256])
def test_head_dims_that_are_no_power_of_two_or_wide_work(head_dim):
    case = make_case([1, 1, 20, 3], [50, 7, 20, 40], head_dim=head_dim, shared_blocks=0)
    assert_attends(case)
    assert_attends(make_case([1] * 3, [40, 36, 50], head_dim=head_dim, shared_blocks=2))


def test_groups_wider_than_a_tile_work():
    assert_attends(make_case([1, 9], [20, 12], group=71, num_kv_heads=1))


def test_batches_of_unlike_windows_are_prepared_together():
    case = make_case([1] * 4, [200, 9, 90, 64])
    other = replace(case.batch, window=16, scratch={})
    kernels = TritonKernels(None, case.spec)
    kernels.prepare(case.batch)
    kernels.prepare(other)
    assert relative_error(kernels.attend(case.q, case.kv, case.batch), case.expected) < RELATIVE_ERROR[torch.float32]
    within = kernels.attend(case.q, case.kv, other)
    assert torch.equal(within, kernels.attend(case.q, case.kv, other))
    assert relative_error(within[1], case.expected[1]) < RELATIVE_ERROR[torch.float32]
    assert relative_error(within[0], case.expected[0]) > 0.1


def test_a_prefill_tile_fits_the_card_at_every_head_dim():
    for card in (Card(132, 227 << 10), Card(128, 99 << 10, 8)):
        for head_dim, dtype in product_of((64, 128, 256), (torch.bfloat16, torch.float32)):
            for num_tokens, context, group in product_of((10, 4000), (10, 4000), (1, 8)):
                tiling = prefill_tiling(num_tokens, context, 8, group, head_dim, dtype, card)
                size = head_dim * dtype.itemsize
                queries, under_way = tiling.block_m * size, (tiling.num_stages - 1) * 2 * tiling.tile * size
                assert queries + under_way <= card.shared_memory_bytes


def test_group_that_is_no_power_of_two_works():
    assert_attends(make_case([1, 1, 40, 50], [100, 7, 40, 150], group=3))


def test_decode_twice_with_one_scratch_gives_the_same():
    case = make_case([1] * 3, [400, 1, 90])
    kernels = TritonKernels(None, case.spec)
    first = attend(case, kernels)
    assert torch.equal(first, attend(case, kernels))


@pytest.mark.parametrize("group", [4, 8, 9])
def test_decode_of_one_row_in_more_parts_than_are_merged_at_a_time_equals_reference(group):
    tiling = decode_tiling(1, 1, 32, torch.float32, Card(132, 227 << 10), group)
    assert 1100 > tiling.merge_rows // group * MIN_ITEM_TOKENS > 200
    assert_attends(make_case([1], [1100], torch.float32, group=group, num_kv_heads=1, head_dim=32))


def test_decode_of_one_long_and_many_short_rows_equals_reference():
    assert_attends(make_case([1] * 20, [900] + [3] * 19))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_prefill_equals_reference_over_dtypes_and_block_sizes(dtype, block_size):
    assert_attends(make_case([70, 2, 129], [70, 130, 200], dtype, block_size))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_prefill_equals_reference_over_groups_and_head_dims(group, head_dim):
    assert_attends(make_case([33, 65], [33, 90], group=group, head_dim=head_dim))


def test_mixed_batch_of_decodes_prompts_and_chunks_equals_reference():
    assert_attends(make_case([1, 1, 1, 40, 17, 2], [1, 80, 33, 40, 100, 66]))


def test_last_chunk_of_one_token_after_longer_ones_equals_reference():
    assert_attends(make_case([1, 40, 1], [9, 40, 55]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_shared_prefix_decode_equals_reference(dtype, block_size):
    assert_attends(make_case([1] * 5, [130, 129, 200, 140, 150], dtype, block_size, shared_blocks=128 // block_size))


def test_rows_outside_the_shared_group_attend_to_their_own_blocks():
    assert_attends(make_case([1] * 5, [130, 70, 200, 5, 1], shared_blocks=4, sharers=3))


def test_shared_prefix_of_nothing_equals_reference():
    case = make_case([1] * 3, [30, 70, 20], shared_blocks=1)
    case.batch.shared_lens_B.zero_()
    assert_attends(case)


def test_mixed_batch_with_shared_prefix_equals_reference():
    assert_attends(make_case([1, 1, 1, 20], [70, 75, 90, 80], shared_blocks=4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 100, 1024])
def test_norms_equal_reference(dtype, width):
    x, residual = (torch.randn(5, width, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=DEVICE).to(dtype)

    def expected(value):
        return value * (value.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()

    out = triton_norms.rms_norm(x, weight, 1e-6)
    assert relative_error(out, expected(x.double())) < RELATIVE_ERROR[dtype]
    total = x.double() + residual.double()
    normed, summed = triton_norms.add_rms_norm(x, residual, weight, 1e-6)
    assert relative_error(summed, total) < RELATIVE_ERROR[dtype]
    assert relative_error(normed, expected(total)) < RELATIVE_ERROR[dtype]
    assert summed.data_ptr() == residual.data_ptr()


def test_rms_norm_takes_rows_of_a_wider_tensor():
    x = torch.randn(5, 200, device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    assert torch.equal(
        triton_norms.rms_norm(x[:, :64], weight, 1e-6), triton_norms.rms_norm(x[:, :64].clone(), weight, 1e-6)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_of_parts_is_that_of_their_sum(dtype):
    parts, residual = torch.randn(4, 5, 100, device=DEVICE), torch.randn(5, 100, device=DEVICE).to(dtype)
    weight = torch.randn(100, device=DEVICE).to(dtype)
    total = parts.double().sum(0) + residual.double()
    normed, summed = triton_norms.add_parts_rms_norm(parts, residual, weight, 1e-6)
    expected = total * (total.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert normed.dtype == summed.dtype == dtype and summed.data_ptr() == residual.data_ptr()
    assert relative_error(summed, total) < RELATIVE_ERROR[dtype]
    assert relative_error(normed, expected) < RELATIVE_ERROR[dtype]


def check_product(kind, num_rows, num_out, width, dtype):
    x = torch.randn(num_rows, width + 8, device=DEVICE).to(dtype)[:, :width]
    weight = (torch.randn(num_out, width, device=DEVICE) * width**-0.5).to(dtype)
    bias = torch.randn(num_out, device=DEVICE).to(dtype) if kind is not Kind.SILU else None
    tiling = product_tiling(kind, num_rows, width)
    assert tiling is not None
    expected = x.double() @ weight.double().T
    if kind is Kind.SILU:
        gate, up = expected.chunk(2, -1)
        expected = gate * gate.sigmoid() * up
    else:
        expected += bias.double()
    out = product(kind, x, weight, bias, tiling)
    if kind is Kind.PARTS:
        assert out.shape[0] == tiling.parts and out.dtype == torch.float32
        out = out.sum(0)
    # A product of parts is not rounded to the dtype, but its inputs are.
    assert relative_error(out, expected) < RELATIVE_ERROR[dtype]


HALF_DTYPES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]


@pytest.mark.parametrize("num_rows", [1, 4])
def test_thin_products_of_16_bits_with_a_float32_weight_are_not_rounded(num_rows):
    x_TD = torch.randn(num_rows, 600, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)[:, :500]
    weight_OD = torch.randn(21, 500, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert triton_thin.fits_float32(x_TD, weight_OD)
    found_TO = triton_thin.thin_linear_float32(x_TD, weight_OD)
    assert found_TO.dtype == torch.float32
    torch.testing.assert_close(found_TO.double(), x_TD.double() @ weight_OD.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 65, 100])
def test_product_equals_reference_over_rows_and_kinds(kind, num_rows):
    for dtype in HALF_DTYPES:
        check_product(kind, num_rows, 128, 512, dtype)


@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.PARTS])
def test_product_of_many_rows_equals_reference(kind):
    check_product(kind, 130, 64, 256, HALF_DTYPES[-1])


def test_products_that_do_not_fit_are_left_to_the_general_one():
    x, weight = torch.zeros(8, 512, dtype=torch.float16), torch.zeros(2048, 512, dtype=torch.float16)
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    assert fitting_tiling(Kind.PLAIN, x, weight) is not None
    for rows, matrix in [
        (x.float(), weight.float()),
        (x.to(torch.bfloat16), weight),
        (x[:0], weight),
        (x[0], weight),
        (x, weight[:2047]),
        (x, weight[:2016]),  # 63 programs
        (x, torch.zeros(2048, 516, dtype=torch.float16, device=DEVICE)[:, :512]),
        (x, torch.zeros(2048 * 512 + 1, dtype=torch.float16, device=DEVICE)[1:].view(2048, 512)),
        (x[:, :500], weight[:, :500]),
        (x.t().contiguous().t(), weight),
        (x, weight.t().contiguous().t()),
        (x.repeat(40, 1), weight),
        (x, weight.repeat(7, 1)),
    ]:
        assert fitting_tiling(Kind.PLAIN, rows, matrix) is None
    assert fitting_tiling(Kind.SILU, x.repeat(17, 1), weight.repeat(6, 1)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [96, 1100])
def test_silu_mul_equals_reference(dtype, width):
    gate_up = (3 * torch.randn(5, 2 * width, device=DEVICE)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert relative_error(triton_gates.gated_mul(gate_up), gate * gate.sigmoid() * up) < RELATIVE_ERROR[dtype]


def check_qk_norm_rope_write(dtype, head_dim, group, num_kv_heads, num_tokens, with_norm=True, with_rope=True):
    block_size, num_heads = 16, num_kv_heads * group
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    angle = 7 * torch.rand(200, head_dim // 2)
    rope = Rope(torch.cat([angle.cos(), angle.sin()], 1).to(DEVICE)) if with_rope else None
    weights = [torch.randn(head_dim, device=DEVICE).to(dtype) for _ in range(2)]
    norm = QKNorm(*weights, 1e-6) if with_norm else None
    position = torch.randint(0, 200, (num_tokens,), device=DEVICE)
    num_blocks = -(-num_tokens // block_size) + 2
    slot = torch.randperm(num_blocks * block_size, device=DEVICE)[:num_tokens]
    kv = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    q, k, v = qkv.double().view(num_tokens, -1, head_dim).split(sizes, 1)
    if norm is not None:
        q, k = (
            x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
            for x, w in zip((q, k), weights, strict=True)
        )
    if rope is not None:
        cos, sin = rope.table_PE.double()[position][:, None].chunk(2, -1)
        q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (x.chunk(2, -1) for x in (q, k)))
    out = triton_rotary.qk_norm_rope_write(qkv, kv, position, slot, rope, norm)
    stored_k, stored_v = kv.view(2, -1, num_kv_heads, head_dim)[:, slot]
    assert relative_error(out, q) < RELATIVE_ERROR[dtype]
    assert relative_error(stored_k, k) < RELATIVE_ERROR[dtype]
    assert torch.equal(stored_v.double(), v)
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=DEVICE)
    untouched[slot] = False
    assert kv.view(2, -1, num_kv_heads * head_dim)[:, untouched].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_qk_norm_rope_write_equals_reference(dtype, head_dim):
    check_qk_norm_rope_write(dtype, head_dim, group=2, num_kv_heads=2, num_tokens=7)


@pytest.mark.parametrize(("with_norm", "with_rope"), [(False, True), (True, False), (False, False)])
def test_qk_norm_and_rope_are_optional(with_norm, with_rope):
    check_qk_norm_rope_write(torch.float32, 64, 3, 1, 5, with_norm, with_rope)


def check_qkv_attend(context_lens, dtype, head_dim, group, num_kv_heads=2, block_size=16):
    """The fused launch against the two that it replaces, over a cache that holds NaN where nobody may read."""
    case = make_case([1] * len(context_lens), context_lens, dtype, block_size, group, head_dim, num_kv_heads)
    batch, num_heads = case.batch, num_kv_heads * group
    last = torch.tensor(context_lens, device=DEVICE) - 1
    blocks = batch.block_table_BM[torch.arange(len(last), device=DEVICE), last // block_size].long()
    case.kv[:, blocks, last % block_size] = float("nan")
    batch.positions_T, batch.slot_mapping_T = last, blocks * block_size + last % block_size
    angle = 7 * torch.rand(max(context_lens), head_dim // 2)
    rope = Rope(torch.cat([angle.cos(), angle.sin()], 1).to(DEVICE))
    norm = QKNorm(*(torch.randn(head_dim, device=DEVICE).to(dtype) for _ in range(2)), 1e-6)
    qkv = torch.randn(len(last), (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    kernels, kv = TritonKernels(None, case.spec), case.kv.clone()
    kernels.prepare(batch)
    expected = kernels.attend(kernels.qk_norm_rope_write(qkv, kv, batch, rope, norm), kv, batch)
    assert fuses_decode(len(last), group)
    out = kernels.qkv_attend(qkv, case.kv, batch, rope, norm)
    assert relative_error(out, expected) < RELATIVE_ERROR[dtype]
    written, unwritten = kv.isfinite(), ~case.kv.isfinite()
    assert torch.equal(written, ~unwritten)
    assert relative_error(case.kv[written], kv[written]) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 2), (96, 3), (128, 1)])
def test_qkv_attend_equals_its_parts_where_the_newest_token_begins_a_block_an_item_or_a_row(dtype, head_dim, group):
    check_qkv_attend([1, 2, 17, 32, 33, 129, 400], dtype, head_dim, group)


def test_qkv_attend_of_wide_groups_equals_its_parts(monkeypatch):
    assert not fuses_decode(33)
    check_qkv_attend([1 + row % 3 for row in range(32)] + [70], torch.float16, 64, 8, num_kv_heads=1)
    monkeypatch.setattr(triton_attention, "decode_tiling", lambda *_: DecodeTiling(64, 4, 2, 2))
    check_qkv_attend([1, 64, 65, 129, 400], torch.float16, 64, 8, num_kv_heads=1)


def test_qkv_attend_of_a_mixed_batch_or_a_shared_prefix_takes_the_parts(monkeypatch):
    for case in (make_case([1, 3], [20, 30]), make_case([1] * 3, [70, 75, 90], shared_blocks=4)):
        kernels, called = TritonKernels(None, case.spec), []
        kernels.prepare(case.batch)
        monkeypatch.setattr(kernels, "qk_norm_rope_write", lambda *_, called=called, q=case.q: (called.append(1), q)[1])
        width = 4 * case.spec.num_kv_heads * case.spec.head_dim
        out = kernels.qkv_attend(torch.zeros(len(case.q), width, device=DEVICE), case.kv, case.batch, None, None)
        assert called and relative_error(out, case.expected) < RELATIVE_ERROR[torch.float32]


def test_the_kernels_take_the_products_that_fit(monkeypatch):
    case = make_case([1], [1], torch.float16)
    kernels, taken = TritonKernels(None, case.spec), []
    x, weight, bias = (torch.randn(size, device=DEVICE).half() for size in [(20, 512), (128, 512), 128])
    weight *= 512**-0.5
    monkeypatch.setattr(triton_product, "MIN_PROGRAMS", 1)
    monkeypatch.setattr(triton_backend, "product", lambda kind, *rest: (taken.append(kind), product(kind, *rest))[1])
    plain = TorchKernels(None, case.spec)
    residual, norm_weight = x[:, :128] + 1, bias + 3
    fused = kernels.linear_add_rms_norm(x, weight, bias, residual.clone(), norm_weight, 1e-6)
    summed = x.double() @ weight.double().T + bias.double() + residual.double()
    expected = plain.add_rms_norm(summed.float(), torch.zeros_like(summed).float(), norm_weight.float(), 1e-6)
    assert relative_error(fused[0], expected[0]) < 2e-3 and relative_error(fused[1], summed) < 1e-3
    assert relative_error(kernels.linear(x, weight, bias), plain.linear(x, weight, bias)) < 1e-3
    assert relative_error(kernels.linear_silu_mul(x, weight), plain.linear_silu_mul(x, weight)) < 2e-3
    assert taken == [Kind.PARTS, Kind.PLAIN, Kind.SILU]


def test_deep_products_take_a_bias_of_zeros(monkeypatch):
    case, biases = make_case([1], [1], torch.float16), []
    kernels, plain = TritonKernels(None, case.spec), TorchKernels(None, case.spec)
    linear = TorchKernels.linear
    monkeypatch.setattr(TorchKernels, "linear", lambda self, x, w, b: (biases.append(b), linear(self, x, w, b))[1])
    x, weight, bias = (torch.randn(size, device=DEVICE).half() for size in [(112, 8192), (24, 8192), 24])
    for given in (None, bias):
        out = kernels.linear(x, weight, given)
        assert biases[-1].shape == (24,) and (given is None or biases[-1] is given)
        assert relative_error(out, plain.linear(x, weight, given)) < 1e-3
    assert not triton_backend.is_deep(64, 24, 8192) and not triton_backend.is_deep(113, 24, 12288)
    assert triton_backend.is_deep(128, 5120, 12800) and not triton_backend.is_deep(128, 5248, 12800)
    kernels.linear(x.float(), weight.float(), None)
    assert biases[-1] is None, "the zeros are of another dtype"


def test_a_few_hundred_rows_go_to_the_library_with_chosen_tiles_and_what_it_has_not_to_torch():
    class Library:
        has, asked = True, 0

        def linear(self, x_TD, weight_OD):
            self.asked += 1
            return torch.nn.functional.linear(x_TD, weight_OD) if self.has else None

    case = make_case([1], [1], torch.float16)
    kernels, plain, library = TritonKernels(None, case.spec), TorchKernels(None, case.spec), Library()
    kernels._cublaslt = library
    x, weight, bias = (torch.randn(size, device=DEVICE).half() for size in [(160, 64), (264, 64), 264])
    for library.has in (True, False):
        library.asked = 0
        assert relative_error(kernels.linear(x, weight, None), plain.linear(x, weight, None)) < 1e-3
        assert relative_error(kernels.linear_silu_mul(x, weight), plain.linear_silu_mul(x, weight)) < 2e-3
        assert library.asked == 2
    assert relative_error(kernels.linear(x, weight, bias), plain.linear(x, weight, bias)) < 1e-3
    kernels.linear(x[:144], weight, None)
    kernels.linear(x.float(), weight.float(), None)
    assert library.asked == 2, "a bias, few rows and float32 are not for it"


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("num_rows", [5, 16, 24, 32, 48, 64, 100, 128, 200, 256])
def test_full_size_product_equals_reference(kind, num_rows):
    for num_out, width in [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]:
        if num_rows <= 128 or kind is Kind.PARTS or (kind is Kind.PLAIN and width <= MOST_WIDTH):
            check_product(kind, num_rows, num_out, width, torch.bfloat16)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "group"), [(1, 2), (20, 2), (32, 4), (100, 8), (256, 8)])
def test_full_size_qkv_attend_equals_its_parts(rows, group):
    lens = [1 + (row * 131) % 2000 for row in range(rows)]
    check_qkv_attend(lens, torch.bfloat16, 128, group, num_kv_heads=8, block_size=64)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (2, 64), (2, 128), (4, 128), (8, 64)])
def test_full_size_decode_equals_reference(dtype, block_size, group, head_dim):
    lens = [1, 8192, 255, 256, 257, 4000, 2, 63, 1024, 5000, 17, *range(100, 1100, 97)]
    assert_attends(make_case([1] * len(lens), lens, dtype, block_size, group, head_dim, num_kv_heads=8 // group or 1))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (2, 64), (2, 128), (4, 128), (8, 64)])
def test_full_size_mixed_batch_equals_reference(dtype, block_size, group, head_dim):
    query_lens, context_lens = [1, 1, 1, 512, 777, 64, 1, 2000], [300, 1, 5000, 512, 4096, 65, 900, 8192]
    assert_attends(make_case(query_lens, context_lens, dtype, block_size, group, head_dim, num_kv_heads=8 // group))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("rows", [3, 40, 200])
def test_full_size_shared_prefix_decode_equals_reference(dtype, block_size, rows):
    lens = [2048 + 1 + 13 * row for row in range(rows)]
    sharers = rows - 1
    lens[-1] = 77
    case = make_case([1] * rows, lens, dtype, block_size, 2, 128, 2, shared_blocks=2048 // block_size, sharers=sharers)
    assert_attends(case)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shared_blocks", [0, 2])
def test_captured_decode_follows_the_lengths_on_the_device(shared_blocks):
    """The graph is captured with one set of lengths and replayed with others, without the host."""
    final = [600, 1030, 513, 2000] if shared_blocks else [600, 1, 3, 2000]
    case = make_case([1] * 4, final, torch.bfloat16, 256, 2, 128, 8, shared_blocks=shared_blocks)
    kernels = TritonKernels(None, case.spec)
    lengths, case.batch.context_lens_host = case.batch.context_lens_B.clone(), None
    shared_lens = case.batch.shared_lens_B.clone() if shared_blocks else None
    attend(case, kernels)
    case.batch.context_lens_B.fill_(1)
    if shared_lens is not None:
        case.batch.shared_lens_B.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, kernels)
    for _ in range(3):
        graph.replay()
    case.batch.context_lens_B.copy_(lengths)
    if shared_lens is not None:
        case.batch.shared_lens_B.copy_(shared_lens)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, case.expected) < RELATIVE_ERROR[torch.bfloat16]


@needs_gpu
@pytest.mark.gpu
def test_captured_prefill_follows_the_lengths_on_the_device():
    """Captured with all tokens in the last row; replayed with others, without the host."""
    case = make_case([300, 17, 1, 0, 194], [1300, 17, 900, 1, 194], torch.bfloat16, 64, 2, 128, 8)
    kernels, batch = TritonKernels(None, case.spec), without_host_lengths(case).batch
    starts, contexts = batch.query_starts_B1.clone(), batch.context_lens_B.clone()
    batch.query_starts_B1[:-1] = 0
    batch.context_lens_B[:-1], batch.context_lens_B[-1] = 1, batch.num_tokens
    attend(case, kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, kernels)
    graph.replay()
    batch.query_starts_B1.copy_(starts)
    batch.context_lens_B.copy_(contexts)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, case.expected) < RELATIVE_ERROR[torch.bfloat16]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 500, 3000])
def test_full_size_qk_norm_rope_write_equals_reference(dtype, num_tokens):
    check_qk_norm_rope_write(dtype, 128, group=2, num_kv_heads=8, num_tokens=num_tokens)


def test_sizes_of_launches_are_tritons():
    assert [next_power_of_2(number) for number in range(1, 5000)] == list(map(triton.next_power_of_2, range(1, 5000)))
    pairs = [(amount, size) for amount in range(200) for size in (1, 2, 3, 16, 64)]
    assert [cdiv(*pair) for pair in pairs] == [triton.cdiv(*pair) for pair in pairs]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of the interpreter
def test_decodes_in_bfloat16_of_a_cache_in_e4m3_equal_reference_however_large_queries_are():
    """These products are in float16, which has no number from 65,520 on: larger queries still take the best key."""
    spec = AttentionSpec(4, 2, 32, 16, 8, 64, 128, DEVICE, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    batch = make_batch(scatter_rows([(40, 1), (33, 1)], 16, 12, seed=1), spec, num_decodes=2)
    torch.manual_seed(0)
    kv_2NSKE = torch.randn(2, 12, 16, 2, 32, device=DEVICE).to(torch.float8_e4m3fn)
    q_THE = torch.randn(2, 4, 32, device=DEVICE).bfloat16()
    q_THE[1, 0, 3], q_THE[1, 3, 7] = 1e5, -1e6
    kernels = TritonKernels(None, spec)
    kernels.prepare(batch)
    out_THE = kernels.attend(q_THE, kv_2NSKE, batch)
    exact = replace(spec, dtype=torch.float64, kv_dtype=None)
    expected_THE = PlainKernels(None, exact).attend(q_THE.double(), kv_2NSKE.double(), batch)
    assert relative_error(out_THE, expected_THE) < RELATIVE_ERROR[torch.bfloat16]
