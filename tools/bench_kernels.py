"""Times the Triton kernels beside flash-attn on one GPU, and checks each timed result against it.

    python tools/bench_kernels.py                      # the shipped choices at the shapes of docs/log
    python tools/bench_kernels.py --sweep decode       # many tilings, to choose by

Every figure is the median of graph replays of many launches. Decode launches read different cache blocks in turn,
several times the L2 in all. Legend: B requests, H heads, K kv heads, E head dim, S block size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hookline.core.contracts import QKNorm, Rope
from hookline.plugins.kernels.attention import triton_decode, triton_prefill, triton_schedule, triton_shared_prefix
from hookline.plugins.kernels.attention.triton_forms import Scoring
from hookline.plugins.kernels.attention.triton_prefill import PrefillTiling
from hookline.plugins.kernels.attention.triton_schedule import DecodeScratch, DecodeTiling
from hookline.plugins.kernels.attention.triton_shared_prefix import SharedTiling
from hookline.plugins.kernels.norms import triton_gates, triton_norms, triton_rotary
from hookline.plugins.kernels.triton_card import Card

try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = flash_attn_varlen_func = None

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 256
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
SCORING = Scoring.of(HEAD_DIM**-0.5)
ROTATED_BYTES = 400e6
DEVICE = torch.device("cuda")
DECODE_SHAPES = {
    "1x640": [640],
    "32x768": [768] * 32,
    "512x256": [256] * 512,
    "16x8192": [8192] * 16,
    "256x840": [840] * 256,
    "8x1000": [1000] * 8,
    "64 ragged": [100 + 29 * ((37 * row) % 64) for row in range(64)],
    "256 ragged": [100 + 7 * ((37 * row) % 256) for row in range(256)],
}
PREFILL_SHAPES = {
    "16x1024": [1024] * 16,
    "8x2048": [2048] * 8,
    "4x4096": [4096] * 4,
    "64x128": [128] * 64,
    "1x512": [512],
}
SHARED_SHAPES = {"256x(2048+64)": (256, 2048, 64), "32x(2048+64)": (32, 2048, 64), "256x(512+500)": (256, 512, 500)}
"""Rows, tokens they share, tokens of their own."""
ROWS: list[dict[str, object]] = []


def report(kind: str, shape: str, variant: str, time_us: float, **figures: object) -> None:
    row = {"kind": kind, "shape": shape, "variant": variant, "us": round(time_us, 2), **figures}
    ROWS.append(row)
    print(json.dumps(row), flush=True)


def time_us(launches: list[Callable[[], object]], replays: int = 7) -> float:
    """Median microseconds a launch, over graph replays of all launches."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.float() - expected.float()).norm() / expected.float().norm()).item()


@dataclass
class Rotation:
    """One cache, and block tables that use other blocks of it each."""

    kv: torch.Tensor
    tables: list[torch.Tensor]
    lens: torch.Tensor
    q: torch.Tensor


def rotation(lens: list[int], block_size: int, min_launches: int = 10, shared_blocks: int = 0) -> Rotation:
    width = -(-max(lens) // block_size)
    blocks_a_set = len(lens) * (width - shared_blocks) + shared_blocks
    num_sets = max(2, int(ROTATED_BYTES / (blocks_a_set * block_size * TOKEN_BYTES)) + 1)
    kv = torch.empty(
        (2, num_sets * blocks_a_set, block_size, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=DEVICE
    ).normal_()
    order = torch.randperm(num_sets * blocks_a_set, device=DEVICE).int().view(num_sets, blocks_a_set)
    tables = []
    for blocks in order:
        own = blocks[shared_blocks:].view(len(lens), -1)
        tables.append(torch.cat([blocks[:shared_blocks].expand(len(lens), -1), own], 1).contiguous())
    tables *= -(-min_launches // num_sets)
    q = torch.randn(len(lens), HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    return Rotation(kv, tables, torch.tensor(lens, dtype=torch.int32, device=DEVICE), q)


def flash_decode(data: Rotation, table: torch.Tensor) -> torch.Tensor:
    return flash_attn_with_kvcache(
        data.q[:, None], data.kv[0], data.kv[1], cache_seqlens=data.lens, block_table=table, causal=True
    )[:, 0]


def sweep_decode() -> Iterator[DecodeTiling]:
    for tile, warps, stages in ((32, 2, 3), (32, 2, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4)):
        for programs in (1, 2, 3, 4, 8):
            yield DecodeTiling(tile, warps, stages, programs)


def flash_times(data: Rotation, count: int | None = None) -> tuple[torch.Tensor | None, float]:
    """flash-attn's output for the first table, and its time; (None, 0) without the package or with other blocks."""
    if flash_attn_with_kvcache is None or data.kv.shape[2] % 256:
        return None, 0.0
    expected = flash_decode(data, data.tables[0])
    return expected, time_us([partial(flash_decode, data, table) for table in data.tables[:count]])


def bench_decode_shape(name: str, lens: list[int], block_size: int, sweep: bool) -> None:
    scratch = DecodeScratch.make(len(lens), HEADS, KV_HEADS, HEAD_DIM, DEVICE)
    data = rotation(lens, block_size)
    num_bytes = sum(lens) * TOKEN_BYTES
    expected, spent = flash_times(data)
    if expected is not None:
        report("decode", name, f"flash-attn S{block_size}", spent, tb_s=round(num_bytes / spent / 1e6, 2))
    shipped = triton_schedule.decode_tiling(len(lens), KV_HEADS, HEAD_DIM, torch.bfloat16, Card.of(DEVICE))
    for tiling in sweep_decode() if sweep else [shipped]:
        out = torch.full_like(data.q, float("nan"))
        num_items = triton_schedule.schedule_decode(data.lens, scratch, KV_HEADS, tiling)

        def launch(table, out=out, num_items=num_items, tiling=tiling):
            triton_decode.decode_attention(data.q, data.kv, table, num_items, scratch, SCORING, out, tiling)

        label = f"t{tiling.tile} w{tiling.num_warps} s{tiling.num_stages} p{tiling.programs_per_sm} S{block_size}"
        if not runs(label, partial(launch, data.tables[0])):
            continue
        check(label, out, expected)
        spent = time_us([partial(launch, table) for table in data.tables])
        report("decode", name, label, spent, tb_s=round(num_bytes / spent / 1e6, 2))
    if not sweep:
        cut = partial(triton_schedule.schedule_decode, data.lens, scratch, KV_HEADS, shipped)
        report("schedule", name, "once a step", time_us([cut] * 50))


def runs(label: str, launch: Callable[[], object]) -> bool:
    """False, and a line, for a variant that does not fit the card."""
    try:
        launch()
    except Exception as failure:
        print("failed", label, type(failure).__name__, str(failure)[:100])
        return False
    return True


def check(label: str, out: torch.Tensor, expected: torch.Tensor | None) -> None:
    if expected is None:
        assert not out.isnan().any(), label
        return
    wrong = error(out, expected)
    assert wrong < 1e-2, (label, wrong)


def sweep_shared() -> Iterator[SharedTiling]:
    for shape in ((128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3)):
        for parts in (2, 4, 8):
            yield SharedTiling(*shape, parts)


def bench_shared_shape(name: str, rows: int, shared_len: int, own: int, sweep: bool) -> None:
    data = rotation([shared_len + own] * rows, BLOCK_SIZE, shared_blocks=shared_len // BLOCK_SIZE)
    expected, spent = flash_times(data)
    if expected is not None:
        report("shared", name, "flash-attn", spent)
    scratch = DecodeScratch.make(rows, HEADS, KV_HEADS, HEAD_DIM, DEVICE)
    queries = rows * HEADS // KV_HEADS
    shipped = triton_shared_prefix.shared_tiling(queries, KV_HEADS, HEAD_DIM, torch.bfloat16, scratch.card)
    partials = triton_decode.SharedPartials(
        torch.empty(8 * rows, HEADS, HEAD_DIM, device=DEVICE), torch.empty(8 * rows, HEADS, 2, device=DEVICE)
    )
    tiling = triton_schedule.decode_tiling(rows, KV_HEADS, HEAD_DIM, torch.bfloat16, scratch.card)
    shared_lens = torch.full((rows,), shared_len, dtype=torch.int32, device=DEVICE)
    for variant in sweep_shared() if sweep else [shipped]:
        out = torch.full_like(data.q, float("nan"))
        num_items = triton_schedule.schedule_decode(
            data.lens, scratch, KV_HEADS, tiling, shared_lens, variant.tile, variant.max_parts
        )

        def bulk(table, variant=variant):
            triton_shared_prefix.shared_prefix_attention(data.q, data.kv, table, scratch, partials, SCORING, variant)

        def launch(table, bulk=bulk, num_items=num_items, out=out):
            bulk(table)
            triton_decode.decode_attention(
                data.q, data.kv, table, num_items, scratch, SCORING, out, tiling, shared_lens, partials
            )

        label = f"m{variant.block_m} t{variant.tile} w{variant.num_warps} s{variant.num_stages} r{variant.max_parts}"
        if not runs(label, partial(launch, data.tables[0])):
            continue
        check(label, out, expected)
        spent = time_us([partial(launch, table) for table in data.tables])
        bulk_us = time_us([partial(bulk, table) for table in data.tables])
        report("shared", name, label, spent, bulk_us=round(bulk_us, 2))


def sweep_prefill() -> Iterator[PrefillTiling]:
    for shape in (
        (64, 32, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (128, 32, 8, 4), (128, 64, 8, 3),
        (128, 128, 8, 2), (256, 32, 16, 3), (256, 64, 16, 3),
    ):  # fmt: skip
        yield PrefillTiling(*shape)


def bench_prefill_shape(name: str, lens: list[int], block_size: int, sweep: bool) -> None:
    data = rotation(lens, block_size, min_launches=4)
    tables = data.tables[:6]
    starts_host = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    starts = torch.from_numpy(starts_host).to(DEVICE)
    q = torch.randn(sum(lens), HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    flops = sum(2 * HEADS * HEAD_DIM * length * (length + 1) for length in lens)
    expected = None

    def flash(table):
        return flash_attn_varlen_func(
            q, data.kv[0], data.kv[1], starts, starts, max(lens), max(lens), causal=True, block_table=table
        )

    if flash_attn_varlen_func is not None and block_size % 256 == 0:
        expected = flash(tables[0])
        spent = time_us([partial(flash, table) for table in tables])
        report("prefill", name, f"flash-attn S{block_size}", spent, tflop_s=round(flops / spent / 1e6))
    shipped = triton_prefill.prefill_tiling(
        sum(lens), max(lens), HEADS, HEADS // KV_HEADS, HEAD_DIM, torch.bfloat16, Card.of(DEVICE)
    )
    for tiling in sweep_prefill() if sweep else [shipped]:
        out = torch.full_like(q, float("nan"))
        tiles = triton_prefill.query_tiles(starts_host, np.array(lens), 0, tiling.block_m // (HEADS // KV_HEADS))
        tiles_W2 = torch.from_numpy(tiles).to(DEVICE)

        def launch(table, out=out, tiles_W2=tiles_W2, tiling=tiling):
            triton_prefill.prefill_attention(q, data.kv, table, starts, data.lens, tiles_W2, SCORING, out, tiling)

        label = f"m{tiling.block_m} t{tiling.tile} w{tiling.num_warps} s{tiling.num_stages} S{block_size}"
        if not runs(label, partial(launch, tables[0])):
            continue
        check(label, out, expected)
        spent = time_us([partial(launch, table) for table in tables])
        report("prefill", name, label, spent, tflop_s=round(flops / spent / 1e6))


def bench_ops() -> None:
    weight = torch.randn(1024, device=DEVICE, dtype=torch.bfloat16)
    head_weight = torch.randn(HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    norm = QKNorm(head_weight, head_weight, 1e-6)
    rope = Rope(torch.randn(4096, HEAD_DIM, device=DEVICE))
    qkv_width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    kv = torch.empty((2, 80, 256, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=DEVICE)
    for tokens in (1, 32, 256, 16384):
        count = 20 if tokens <= 256 else 4
        inputs = {
            width: torch.randn(count, tokens, width, device=DEVICE, dtype=torch.bfloat16)
            for width in (1024, 6144, qkv_width)
        }
        residual = torch.randn(tokens, 1024, device=DEVICE, dtype=torch.bfloat16)
        positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
        slots = torch.randperm(80 * 256, device=DEVICE)[:tokens]

        def torch_norm(x):
            return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)

        def torch_silu(x):
            gate, up = x.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up

        operations: dict[str, tuple[int, int, Callable[[torch.Tensor], object]]] = {
            "rms_norm": (1024, 2048, lambda x: triton_norms.rms_norm(x, weight, 1e-6)),
            "rms_norm torch": (1024, 2048, torch_norm),
            "add_rms_norm": (
                1024, 4096, partial(triton_norms.add_rms_norm, residual_TD=residual, weight_D=weight, eps=1e-6),
            ),
            "silu_mul": (6144, 9216, triton_gates.gated_mul),
            "silu_mul torch": (6144, 9216, torch_silu),
            "qk_norm_rope_write": (
                qkv_width, 2 * qkv_width,
                partial(
                    triton_rotary.qk_norm_rope_write,
                    kv_2NSKE=kv, positions_T=positions, slot_mapping_T=slots, rope=rope, norm=norm,
                ),
            ),
        }  # fmt: skip
        for name, (width, elements, operation) in operations.items():
            spent = time_us([partial(operation, x) for x in inputs[width]])
            report("ops", f"T={tokens}", name, spent, tb_s=round(2 * elements * tokens / spent / 1e6, 2))


def print_summary(top: int) -> None:
    """The fastest variants of each shape beside flash-attn."""
    keys = list(dict.fromkeys((row["kind"], row["shape"]) for row in ROWS))
    print(f"\n{'kind':9}{'shape':16}{'variant':28}{'us':>10}  figures")
    for kind, shape in keys:
        rows = [row for row in ROWS if (row["kind"], row["shape"]) == (kind, shape)]
        if kind in ("decode", "prefill", "shared"):
            flash = [row for row in rows if "flash" in str(row["variant"])]
            rows = (
                flash + sorted((row for row in rows if row not in flash), key=lambda row: float(str(row["us"])))[:top]
            )
        for row in rows:
            extra = {key: value for key, value in row.items() if key not in ("kind", "shape", "variant", "us")}
            print(f"{kind:9}{shape:16}{row['variant']:28}{row['us']:>10}  {extra or ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ["decode", "shared", "prefill"]
    parser.add_argument("--only", nargs="+", choices=[*sections, "ops"], default=[*sections, "ops"])
    parser.add_argument("--sweep", nargs="*", choices=sections, default=[], help="sections to try many tilings in")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[BLOCK_SIZE])
    parser.add_argument("--top", type=int, default=6, help="variants a shape in the summary")
    parser.add_argument("--json", help="write all figures here")
    args = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    if "ops" in args.only:
        bench_ops()
    for block_size in args.block_sizes:
        if "decode" in args.only:
            for name, lens in DECODE_SHAPES.items():
                bench_decode_shape(name, lens, block_size, "decode" in args.sweep)
        if "prefill" in args.only:
            for name, lens in PREFILL_SHAPES.items():
                bench_prefill_shape(name, lens, block_size, "prefill" in args.sweep)
    if "shared" in args.only:
        for name, sizes in SHARED_SHAPES.items():
            bench_shared_shape(name, *sizes, sweep="shared" in args.sweep)
    print("done after", round(time.monotonic() - started), "s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(ROWS, file)
    print_summary(args.top)


if __name__ == "__main__":
    main()
