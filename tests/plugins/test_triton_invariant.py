"""The Triton kernels of batch-invariant mode: under the interpreter, which ways a row takes; the bits are a card's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hookline.core.contracts import AttentionForm, AttentionSpec, QKNorm, Rope
from hookline.core.testing.batches import Row, make_batch, random_cache, scatter_rows
from hookline.core.testing.plain_kernels import PlainKernels

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # under the interpreter

from hookline.plugins.kernels.invariant import triton_attention, triton_kernels  # noqa: E402
from hookline.plugins.kernels.invariant.triton_kernels import InvariantTritonKernels  # noqa: E402
from hookline.plugins.kernels.products import triton_row_product  # noqa: E402
from hookline.plugins.kernels.products.triton_row_product import (  # noqa: E402
    FLOAT32_TILES,
    MOST_PARTS,
    RowScratch,
    apart_tile,
    row_product,
    row_tile,
    row_tiles,
    takes_parts_apart,
    weight_parts,
)
from hookline.plugins.kernels.triton_backend import TritonKernels  # noqa: E402
from hookline.plugins.kernels.triton_card import Card  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def rows_of_a_tile_alike(monkeypatch):
    """NumPy's BLAS, which the interpreter uses, adds a row up by its place in the tile on some processors."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype=None: np.einsum("mk,kn->mn", a, b, dtype=dtype))


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def spec(dtype: torch.dtype = torch.float32, max_model_len: int = 256) -> AttentionSpec:
    return AttentionSpec(2, 1, 16, 16, 8, 64, max_model_len, DEVICE, dtype, batch_invariant=True)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_tile_computes_the_product(dtype, silu):
    x_TD, weight_OD = numbers(35, 96, dtype=dtype), numbers(72, 96, dtype=dtype, seed=1) * 0.1
    expected = PlainKernels(None, spec()).linear(x_TD.double(), weight_OD, None)
    if silu:
        expected = PlainKernels(None, spec()).silu_mul(expected)
    for tile in row_tiles(1 + silu, dtype):
        found = row_product(x_TD, weight_OD, None, silu=silu, tile=tile)
        torch.testing.assert_close(found.double(), expected, atol=5e-3 if dtype == torch.float16 else 1e-5, rtol=0)


def test_rows_with_gaps_and_a_weight_that_no_tile_divides_are_multiplied_with_their_bias():
    x_TD, weight_OD, bias_O = numbers(5, 100, dtype=torch.float16)[:, 3:98], numbers(7, 95, seed=1).half(), numbers(7)
    expected = PlainKernels(None, spec()).linear(x_TD.double(), weight_OD, bias_O)
    found = row_product(x_TD, weight_OD, bias_O.half())
    torch.testing.assert_close(found.double(), expected, atol=5e-2, rtol=0)
    assert row_product(x_TD[:0], weight_OD, None).shape == (0, 7)


def test_more_rows_and_outputs_take_larger_tiles():
    chosen = [row_tile(rows, 4096, 1, torch.bfloat16) for rows in (1, 16, 32, 256, 1024, 4096)]
    assert [tile.block_t for tile in chosen] == sorted(tile.block_t for tile in chosen)
    assert (chosen[0].block_t, chosen[-1].block_t) == (16, 256)
    assert row_tile(4096, 4096, 2, torch.bfloat16).block_t == 128, "gate and up share the registers"
    assert row_tile(144, 4096, 1, torch.bfloat16).block_t == 64, "256 rows for 144 are too many"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_of_a_weight_give_the_bits_of_one_program_for_all(dtype):
    width, num_out = (1600 if dtype == torch.float16 else 800), 150
    x_TD, weight_OD = numbers(70, width, dtype=dtype), numbers(num_out, width, dtype=dtype, seed=1) * 0.1
    bias_O = numbers(num_out, dtype=dtype, seed=2)
    assert weight_parts(num_out, width, dtype.itemsize) == 3, "of two, either order gives the same bits"
    scratch = RowScratch.make(DEVICE)
    expected = row_product(x_TD, weight_OD, bias_O)
    exact = PlainKernels(None, spec()).linear(x_TD.double(), weight_OD, bias_O)
    torch.testing.assert_close(expected.double(), exact, atol=5e-2 if dtype == torch.float16 else 1e-4, rtol=0)
    for num_rows in (70, 33, 1):
        scratch.partials.fill_(torch.nan)
        apart = row_product(x_TD[:num_rows], weight_OD, bias_O, scratch=scratch)
        assert torch.equal(apart, expected[:num_rows]), num_rows
        assert not scratch.partials.isnan().all(), "each part was left there"
        assert not scratch.counters.any(), "as the next launch wants them"


def test_parts_are_a_matter_of_the_weight():
    assert [weight_parts(1024, width, 2) for width in (64, 1024, 2048, 3072, 20_000)] == [1, 2, 4, 4, 4]
    assert weight_parts(4096, 4096, 2) == 1, "enough outputs for a card"
    scratch = RowScratch.make(torch.device("meta"))
    for num_rows in (1, 16, 128, 300, 640, 5000):
        for num_out in (1, 128, 1024, 2048):
            tiles = row_tiles(1, torch.bfloat16, is_apart=True)
            if takes_parts_apart(num_rows, num_out):
                assert apart_tile(num_rows, num_out, 4, torch.bfloat16) in tiles
                numbers_of_tiles = {tile: tile.number(num_rows, num_out) for tile in tiles}
                largest = max(tile.block_t * tile.block_o * number for tile, number in numbers_of_tiles.items())
                assert largest * MOST_PARTS <= len(scratch.partials), "with any tile"
                assert max(numbers_of_tiles.values()) <= len(scratch.counters)


@pytest.mark.parametrize("tile", FLOAT32_TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_switch_leaves_a_single_tile(monkeypatch, tile, dtype):
    monkeypatch.setattr(triton_row_product, "ONLY_TILE", tile)
    sizes = [(rows, out) for rows in (1, 40, 4096) for out in (64, 1024, 4096)]
    chosen = {row_tile(*size, operands, dtype) for size in sizes for operands in (1, 2)}
    assert chosen | {apart_tile(*size, 4, dtype) for size in sizes} == {tile}
    assert all(
        tile in row_tiles(operands, dtype, is_apart=apart) for operands, apart in ((1, False), (2, False), (1, True))
    )


def has_four_programs_at_once(monkeypatch):
    card = replace(Card.of(DEVICE), num_sms=4)
    monkeypatch.setattr(triton_kernels, "Card", SimpleNamespace(of=lambda device: card))
    monkeypatch.setattr(triton_kernels, "PROGRAMS_PER_SM", 1)


def attended(kernels, rows, num_decodes, q_THE, kv_2NSKE, window=None, form=None):
    batch = replace(make_batch(rows, kernels.spec, num_decodes=num_decodes), window=window)
    kernels.prepare(batch)
    return kernels.attend(q_THE, kv_2NSKE, batch, *([] if form is None else [form]))


@pytest.mark.parametrize(
    ("window", "form"), [(None, None), (25, AttentionForm(sinks_H=torch.ones(2, device=DEVICE)))], ids=["plain", "both"]
)
def test_a_token_attends_alike_in_a_prompt_a_chunk_and_as_one_of_few_or_many_decodes(monkeypatch, window, form):
    for module in (triton_attention, triton_kernels):
        monkeypatch.setattr(module, "SEGMENT", 32)
    has_four_programs_at_once(monkeypatch)  # so up to four decodes are cut
    kernels = TritonKernels(None, spec())
    [row] = scatter_rows([(75, 75)], 16, 12, seed=0)
    q_THE, kv_2NSKE = numbers(75, 2, 16), random_cache(kernels.spec, 12, seed=1)[:, 0]
    exact = PlainKernels(None, replace(kernels.spec, dtype=torch.float64))
    expected = attended(exact, [row], 0, q_THE.double(), kv_2NSKE.double(), window, form)
    whole = attended(kernels, [row], 0, q_THE, kv_2NSKE, window, form)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=0)
    chunk = attended(kernels, [Row(70, 41, row.blocks)], 0, q_THE[29:70], kv_2NSKE, window, form)
    assert torch.equal(chunk, whole[29:70])
    for token in (31, 32, 74):
        one = Row(token + 1, 1, row.blocks)
        few = attended(kernels, [one], 1, q_THE[token : token + 1], kv_2NSKE, window, form)
        many = attended(kernels, [one] * 5, 5, q_THE[token : token + 1].expand(5, -1, -1), kv_2NSKE, window, form)
        assert torch.equal(few[0], whole[token]), f"token {token} alone"
        assert torch.equal(many[4], whole[token]), f"token {token} in a crowd"


def qkv_attended(kernels, lengths, window, form, *, with_norm=True, rotary_dim=None):
    """What decodes of these contexts give, and the cache after them, which holds NaN where a newest token belongs."""
    spec = kernels.spec
    num_blocks = sum(-(-length // spec.block_size) for length in lengths)
    rows = scatter_rows([(length, 1) for length in lengths], spec.block_size, num_blocks, seed=0)
    batch = replace(make_batch(rows, spec, num_decodes=len(rows)), window=window)
    kv_2NSKE = random_cache(spec, num_blocks, seed=1)[:, 0]
    kv_2NSKE.flatten(1, 2)[:, batch.slot_mapping_T] = torch.nan
    qkv_TC = numbers(len(rows), (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, dtype=spec.dtype, seed=2)
    weight_E = numbers(spec.head_dim, dtype=spec.dtype, seed=3)
    norm = QKNorm(weight_E, weight_E.flip(0), 1e-6) if with_norm else None
    rope = None if rotary_dim is None else Rope(numbers(max(lengths), rotary_dim, seed=4))
    kernels.prepare(batch)
    return kernels.qkv_attend(qkv_TC, kv_2NSKE, batch, rope, norm, form or AttentionForm()), kv_2NSKE


@pytest.mark.parametrize(
    ("window", "form"), [(None, None), (25, AttentionForm(sinks_H=torch.ones(6, device=DEVICE)))], ids=["plain", "both"]
)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "with_norm", "with_rope"),
    [
        (16, torch.float16, True, True),
        (40, torch.float32, True, False),
        (16, torch.float32, False, True),
        (16, torch.float16, False, False),
    ],
)
def test_decodes_write_their_newest_token_themselves_and_attend_alike(
    monkeypatch, head_dim, dtype, with_norm, with_rope, window, form
):
    for module in (triton_attention, triton_kernels):
        monkeypatch.setattr(module, "SEGMENT", 32)
    has_four_programs_at_once(monkeypatch)  # so up to two decodes are cut
    kernels = TritonKernels(None, AttentionSpec(6, 2, head_dim, 16, 8, 64, 256, DEVICE, dtype, batch_invariant=True))
    written, write = [], kernels.qk_norm_rope_write
    monkeypatch.setattr(kernels, "qk_norm_rope_write", lambda *given: (written.append(1), write(*given))[1])
    what = dict(with_norm=with_norm, rotary_dim=head_dim if with_rope else None)
    for lengths in ([33, 75], [64], [1, 2, 16, 17, 32, 33, 75]):
        monkeypatch.setattr(triton_kernels, "MOST_FUSED_ROWS", 0)
        expected, expected_kv = qkv_attended(kernels, lengths, window, form, **what)
        assert written.pop() and expected.isfinite().all() and expected_kv.isfinite().all()
        monkeypatch.setattr(triton_kernels, "MOST_FUSED_ROWS", 1 << 20)
        found, found_kv = qkv_attended(kernels, lengths, window, form, **what)
        assert not written
        assert torch.equal(found, expected), lengths
        assert torch.equal(found_kv, expected_kv), lengths


def test_heads_that_are_rotated_in_part_and_prompts_have_a_launch_for_the_newest_tokens(monkeypatch):
    kernels, written = TritonKernels(None, spec()), []
    monkeypatch.setattr(
        kernels, "qk_norm_rope_write", lambda qkv_TC, *_: (written.append(1), numbers(len(qkv_TC), 2, 16))[1]
    )
    qkv_attended(kernels, [5], None, None, rotary_dim=8)
    assert written.pop()
    batch = make_batch(scatter_rows([(5, 1), (5, 5)], 16, 2, seed=0), kernels.spec, num_decodes=1)
    kernels.prepare(batch)
    kernels.qkv_attend(numbers(6, 64), random_cache(kernels.spec, 2, seed=1)[:, 0], batch, None, None)
    assert written.pop()
    qkv_attended(kernels, [5], None, None, rotary_dim=16)
    assert not written


def test_few_decodes_of_long_contexts_have_a_program_for_each_segment(monkeypatch):
    has_four_programs_at_once(monkeypatch)
    kernels = TritonKernels(None, spec(max_model_len=3000))
    assert isinstance(kernels, InvariantTritonKernels)
    row = Row(20, 1, (0, 1))
    for num_rows, context, expected in ((1, 3000, 3), (1, 1024, 1), (4, 1500, 2), (5, 3000, 1)):
        batch = replace(make_batch([row] * num_rows, kernels.spec, num_decodes=num_rows), max_context_len=context)
        kernels.prepare(batch)
        assert batch.scratch["tiles"].num_segments == expected, (num_rows, context)


def test_a_tokens_experts_add_up_alike_beside_others():
    kernels = TritonKernels(None, spec())
    x_TD, gate_up, down = numbers(40, 48), numbers(4, 64, 48, seed=1) * 0.1, numbers(4, 48, 32, seed=2) * 0.1
    expert_TA = torch.rand(40, 4, generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :2].to(DEVICE)
    weight_TA = torch.full((40, 2), 0.5, device=DEVICE)
    every = kernels.expert_mlp(x_TD, expert_TA, weight_TA, gate_up, down)
    expected = PlainKernels(None, spec()).expert_mlp(x_TD.double(), expert_TA, weight_TA, gate_up, down)
    torch.testing.assert_close(every.double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(kernels.expert_mlp(x_TD[7:8], expert_TA[7:8], weight_TA[7:8], gate_up, down)[0], every[7])


def test_decodes_are_listed_with_the_longest_first_and_equal_ones_in_their_order():
    lens = torch.tensor([3, 9, 9, 1, 40, 9, *range(100, 120)], dtype=torch.int32, device=DEVICE)
    order = torch.sort(lens.cpu(), descending=True, stable=True).indices.tolist()
    assert triton_attention.longest_first(lens).tolist() == [[row, 0] for row in order]
