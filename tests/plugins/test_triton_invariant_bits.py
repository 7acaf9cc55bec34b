"""Triton's kernels of batch-invariant mode on a GPU, bit by bit: products over all tiles, attention, experts.

Without conftest's fixtures: pytest --noconftest runs it anywhere.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from hookline.core.contracts import AttentionForm, AttentionSpec, QKNorm, Rope
from hookline.core.testing.batches import Row, make_batch, random_cache, scatter_rows
from hookline.plugins.kernels.invariant import triton_kernels
from hookline.plugins.kernels.norms import triton_rotary
from hookline.plugins.kernels.products.triton_row_product import RowScratch, row_product, row_tiles, weight_parts
from hookline.plugins.kernels.triton_backend import TritonKernels

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SHAPES = (
    (1024, 4096),
    (2048, 1024),
    (3072, 1024),
    (1024, 6144),
    (4096, 4096),
    (12288, 4096),
    (1536, 1024),
    (96, 200),
    (1030, 130),
)
"""Input and output features: those of Qwen3-0.6B and 8B, and some that no tile divides."""
PRODUCTS = (
    *((*shape, torch.bfloat16) for shape in SHAPES),
    *((*shape, dtype) for shape in ((1024, 4096), (1030, 130)) for dtype in (torch.float16, torch.float32)),
)
ROWS = (1, 2, 3, 16, 17, 31, 64, 100, 128, 129, 256, 300, 1024)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("width", "num_out", "dtype"), PRODUCTS)
def test_every_tile_gives_the_same_bits(width, num_out, dtype, silu):
    x_TD, weight_OD = numbers(300, width, dtype=dtype), numbers(num_out, width, dtype=dtype, seed=1) * width**-0.5
    parts = 1 if silu else weight_parts(num_out, width, dtype.itemsize)
    tiles, scratch = row_tiles(2 if silu or parts > 1 else 1, dtype), RowScratch.make(DEVICE)
    found = [row_product(x_TD, weight_OD, None, silu=silu, tile=tile) for tile in tiles]
    if parts > 1:  # a program for each
        apart = row_tiles(1, dtype, is_apart=True)
        found += [row_product(x_TD, weight_OD, None, tile=tile, scratch=scratch) for tile in apart]
        tiles += apart
        assert not scratch.counters.any()
    expected, *others = found
    product = x_TD.double() @ weight_OD.double().T
    if silu:
        gate, up = product.chunk(2, -1)
        product = torch.nn.functional.silu(gate) * up
    assert float((expected - product).abs().max()) < (1e-4 if dtype == torch.float32 else 0.1)
    assert [tile for tile, other in zip(tiles[1:], others, strict=True) if not torch.equal(other, expected)] == []


@pytest.mark.parametrize(("width", "num_out", "dtype"), PRODUCTS)
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(width, num_out, dtype):
    x_TD, weight_OD = numbers(1100, width, dtype=dtype), numbers(num_out, width, dtype=dtype, seed=1)
    bias_O = numbers(num_out, dtype=dtype, seed=2)
    expected, scratch = row_product(x_TD, weight_OD, bias_O), RowScratch.make(DEVICE)
    for num_rows in ROWS:
        for first in (0, 1, 1100 - num_rows):
            some = slice(first, first + num_rows)
            product_TO = row_product(x_TD[some], weight_OD, bias_O, scratch=scratch)
            assert torch.equal(product_TO, expected[some]), (num_rows, first)


def spec_of(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 64) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, block_size, 64, 8192, 8192, DEVICE, dtype, batch_invariant=True)


def attended(kernels, q_THE, kv_2NSKE, rows, num_decodes, spec, form, window):
    batch = replace(make_batch(rows, spec, num_decodes=num_decodes), window=window)
    kernels.prepare(batch)
    return kernels.attend(q_THE, kv_2NSKE, batch, *([form] if form.features else []))


FORMS = pytest.mark.parametrize(("form", "window"), [("plain", None), ("sinks", 2000), ("softcap", 100)])
HEADS = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (16, 8, 128, torch.bfloat16),
        (64, 8, 64, torch.float16),
        (4, 1, 256, torch.bfloat16),
        (14, 2, 80, torch.bfloat16),
        (8, 2, 64, torch.float32),
    ],
)


def form_of(name: str, heads: int, dtype: torch.dtype) -> AttentionForm:
    return AttentionForm(
        softcap=30.0 if name == "softcap" else None,
        sinks_H=torch.linspace(-2, 4, heads, device=DEVICE).to(dtype) if name == "sinks" else None,
    )


@FORMS
@HEADS
def test_a_token_attends_alike_as_a_decode_in_any_chunk_and_beside_others(
    heads, kv_heads, head_dim, dtype, form, window
):
    spec = spec_of(heads, kv_heads, head_dim, dtype)
    kernels = TritonKernels(None, spec)
    form = form_of(form, heads, dtype)
    length, num_blocks = 2500, 140
    sequence, *others = scatter_rows([(length, length), (700, 1), (40, 1), (3000, 1), (90, 90)], 64, num_blocks, seed=1)
    kv_2NSKE = random_cache(spec, num_blocks, seed=2)[:, 0]
    q_THE = numbers(length, heads, head_dim, dtype=dtype)
    expected = attended(kernels, q_THE, kv_2NSKE, [sequence], 0, spec, form, window)
    for first, stop in ((0, 1), (5, 70), (63, 65), (1000, 1100), (1020, 1030), (1024, 2060), (2499, 2500)):
        part = Row(stop, stop - first, sequence.blocks)
        found = attended(kernels, q_THE[first:stop], kv_2NSKE, [part], 0, spec, form, window)
        assert torch.equal(found, expected[first:stop]), f"tokens {first} to {stop} as a chunk"
    crowd = [row for row in others if row.num_queries == 1]
    for at in (0, 1, 62, 63, 64, 511, 1022, 1023, 1024, 1025, 2047, 2048, 2300, 2499):
        row = Row(at + 1, 1, sequence.blocks)
        one_1HE = attended(kernels, q_THE[at : at + 1], kv_2NSKE, [row], 1, spec, form, window)
        assert torch.equal(one_1HE[0], expected[at]), f"token {at} as a decode"
        for copies in (1, 19):  # few have a program for each segment, many have one for all
            rows = [*crowd * copies, row, others[-1]]
            q = torch.cat(
                (numbers(len(rows) - 2, heads, head_dim, dtype=dtype, seed=3), q_THE[at : at + 1], q_THE[:90])
            )
            many_THE = attended(kernels, q, kv_2NSKE, rows, len(rows) - 1, spec, form, window)
            assert torch.equal(many_THE[len(rows) - 2], expected[at]), f"token {at} beside {len(rows) - 1} rows"


def norm_and_rope(
    head_dim: int, dtype: torch.dtype, *, with_norm: bool = True, with_rope: bool = True
) -> tuple[QKNorm | None, Rope | None]:
    weights = (1 + 0.3 * numbers(2, head_dim, seed=5)).to(dtype)
    angle_PR = 7 * numbers(4000, head_dim // 2, dtype=torch.float32, seed=6)
    norm, rope = QKNorm(*weights, 1e-6), Rope(torch.cat((angle_PR.cos(), angle_PR.sin()), 1))
    return norm if with_norm else None, rope if with_rope else None


def qkv_attended(kernels, qkv_TC, kv_2NSKE, rows, num_decodes, given, window=None):
    """What rows attend to, and the cache after it; before it the cache holds NaN where their tokens belong."""
    batch, kv_2NSKE = replace(make_batch(rows, kernels.spec, num_decodes=num_decodes), window=window), kv_2NSKE.clone()
    kv_2NSKE.flatten(1, 2)[:, batch.slot_mapping_T] = torch.nan
    kernels.prepare(batch)
    norm, rope, form = given
    return kernels.qkv_attend(qkv_TC, kv_2NSKE, batch, rope, norm, form), kv_2NSKE


ENDS = (1, 2, 63, 64, 65, 512, 1023, 1024, 1025, 2048, 2049, 3100)
"""Contexts whose newest token begins or ends a block, a tile or a segment."""


@pytest.mark.parametrize(
    ("form", "window", "with_norm", "with_rope"),
    [
        ("plain", None, True, True),
        ("plain", None, True, False),
        ("plain", None, False, True),
        ("plain", None, False, False),
        ("sinks", 2000, True, True),
        ("softcap", 100, True, True),
    ],
)
@HEADS
def test_decodes_that_write_their_newest_token_get_the_bits_of_a_launch_for_it(
    monkeypatch, heads, kv_heads, head_dim, dtype, form, window, with_norm, with_rope
):
    spec = replace(spec_of(heads, kv_heads, head_dim, dtype), max_num_seqs=256)
    kernels, width = TritonKernels(None, spec), (heads + 2 * kv_heads) * head_dim
    given = *norm_and_rope(head_dim, dtype, with_norm=with_norm, with_rope=with_rope), form_of(form, heads, dtype)
    for lengths in ([1], [2500], list(ENDS), [*ENDS, *(1 + 37 * row % 900 for row in range(256 - len(ENDS)))]):
        num_blocks = sum(-(-length // 64) for length in lengths)
        rows = scatter_rows([(length, 1) for length in lengths], 64, num_blocks, seed=1)
        kv_2NSKE = numbers(2, num_blocks, 64, kv_heads, head_dim, dtype=dtype, seed=2)
        step = kernels, numbers(len(rows), width, dtype=dtype, seed=3), kv_2NSKE, rows, len(rows), given, window
        monkeypatch.setattr(triton_kernels, "MOST_FUSED_ROWS", 0)
        expected_THE, expected_kv = qkv_attended(*step)
        assert expected_THE.isfinite().all() and expected_kv.isfinite().all()
        monkeypatch.setattr(triton_kernels, "MOST_FUSED_ROWS", 1 << 20)
        for _ in range(5):  # what one thread reads too early might be there by chance
            found_THE, found_kv = qkv_attended(*step)
            assert torch.equal(found_kv, expected_kv), f"the cache after {len(rows)} rows"
            assert torch.equal(found_THE, expected_THE), f"{len(rows)} rows"


@FORMS
@HEADS
def test_a_token_leaves_and_finds_alike_as_a_decode_and_in_a_prompt(
    monkeypatch, heads, kv_heads, head_dim, dtype, form, window
):
    monkeypatch.setattr(triton_kernels, "MOST_FUSED_ROWS", 1 << 20)
    spec = spec_of(heads, kv_heads, head_dim, dtype)
    kernels, length, num_blocks = TritonKernels(None, spec), 2500, 80
    sequence, other = scatter_rows([(length, length), (700, 1)], 64, num_blocks, seed=1)
    qkv_TC = numbers(length, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    given = *norm_and_rope(head_dim, dtype), form_of(form, heads, dtype)
    kv_2NSKE = random_cache(spec, num_blocks, seed=2)[:, 0]
    expected_THE, written = qkv_attended(kernels, qkv_TC, kv_2NSKE, [sequence], 0, given, window)
    for at in (0, 1, 62, 63, 64, 511, 1022, 1023, 1024, 1025, 2047, 2048, 2300, 2499):
        row = Row(at + 1, 1, sequence.blocks[: at // 64 + 1])
        for others in (0, 1, 39):  # few have a program for each segment, many have one for all
            rows, qkv = [*[other] * others, row], torch.cat((qkv_TC[:1].expand(others, -1), qkv_TC[at : at + 1]))
            found_THE, found_kv = qkv_attended(kernels, qkv, written, rows, len(rows), given, window)
            assert torch.equal(found_THE[others], expected_THE[at]), f"token {at} beside {others} rows"
            slot = row.blocks[-1], at % 64
            assert torch.equal(found_kv[:, *slot], written[:, *slot]), f"key and value of token {at}"


@HEADS
def test_heads_get_the_same_bits_however_many_a_program_has(monkeypatch, heads, kv_heads, head_dim, dtype):
    (norm, rope), qkv_TC = norm_and_rope(head_dim, dtype), numbers(300, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    found = []
    for heads_a_program in (16, 1, 2, 4, 8, 32):
        monkeypatch.setattr(triton_rotary, "HEADS_PER_PROGRAM", heads_a_program)
        kv_2NSKE = torch.zeros(2, 5, 64, kv_heads, head_dim, dtype=dtype, device=DEVICE)
        place_T = torch.arange(300, device=DEVICE)
        q_THE = triton_rotary.qk_norm_rope_write(qkv_TC, kv_2NSKE, place_T, place_T, rope, norm, is_ordered=True)
        found.append((q_THE, kv_2NSKE))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(other, found[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_tokens_experts_give_the_same_bits_among_any_number_of_tokens(dtype):
    kernels = TritonKernels(None, spec_of(16, 8, 128, dtype))
    x_TD, router = numbers(9000, 512, dtype=dtype), numbers(64, 512, dtype=dtype, seed=1)
    gate_up, down = numbers(64, 2 * 192, 512, dtype=dtype, seed=2) * 0.05, numbers(64, 512, 192, dtype=dtype, seed=3)

    def mlp(some):
        expert_TA, weight_TA = kernels.route_experts(kernels.linear(x_TD[some], router, None), 8, True)
        return kernels.expert_mlp(x_TD[some], expert_TA, weight_TA, gate_up, down)

    expected = mlp(slice(0, 9000))
    for num_rows in (1, 2, 7, 33, 128, 500, 4000, 5000):
        some = slice(17, 17 + num_rows)
        assert torch.equal(mlp(some), expected[some]), num_rows
