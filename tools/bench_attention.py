"""Bandwidth of decode attention in the forms that models use, on one GPU, beside flash-attn where it has the form.

    python tools/bench_attention.py                # kernels=triton, and flash_attn if it is installed
    python tools/bench_attention.py --rows 64      # other numbers of rows

Every figure is the median of graph replays of many launches, which read different cache blocks in turn, several times
the L2 in all. Bytes are keys and values that a query sees; a window of 128 in a context of 8,192 must cost what a
context of 128 costs. Legend: B rows, H heads, K kv heads, E head dim, S block size.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch

from hookline.core.contracts import AttentionForm, AttentionSpec, Batch
from hookline.plugins.kernels.triton_backend import TritonKernels

DEVICE = torch.device("cuda")
BLOCK_SIZE = 256
ROTATED_BYTES = 400e6
"""Read before the same blocks are read again."""


@dataclass(frozen=True)
class Shape:
    """One decode step: every row has `context` tokens."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def seen(self) -> int:
        """Tokens that a row sees."""
        return self.context if self.window is None else min(self.context, self.window)


SHAPES = (
    Shape("plain, head dim 128 (Qwen3-8B)", 32, 8, 128, 840),
    Shape("plain, head dim 64 (gpt-oss)", 64, 8, 64, 840),
    Shape("plain, head dim 256 (Gemma3-4B)", 8, 4, 256, 840),
    Shape("head dim 256, softcap (Gemma2)", 8, 4, 256, 840, softcap=50.0),
    Shape("head dim 256, window 1024 of 4096", 8, 4, 256, 4096, window=1024),
    Shape("head dim 64, sinks (gpt-oss)", 64, 8, 64, 840, has_sinks=True),
    Shape("head dim 64, window 128 of 840, sinks", 64, 8, 64, 840, window=128, has_sinks=True),
    Shape("head dim 64, window 128 of 8192, sinks", 64, 8, 64, 8192, window=128, has_sinks=True),
    Shape("head dim 64, context 128, sinks", 64, 8, 64, 128, has_sinks=True),
    Shape("head dim 96 (Phi-3)", 32, 32, 96, 840),
    Shape("head dim 80", 32, 32, 80, 840),
)


def batches(shape: Shape, rows: int) -> tuple[torch.Tensor, list[Batch]]:
    """A cache, and batches of this shape over different blocks of it.

    Blocks that a window hides are the same few, so that long contexts need no more memory than they are read.
    """
    width = -(-shape.context // BLOCK_SIZE)
    first = 0 if shape.window is None else max(0, shape.context - shape.window) // BLOCK_SIZE
    seen_blocks = rows * (width - first)
    block_bytes = 2 * BLOCK_SIZE * shape.kv_heads * shape.head_dim * 2
    read_bytes = rows * shape.seen * block_bytes // BLOCK_SIZE
    num_sets = max(2, int(ROTATED_BYTES / read_bytes) + 1)
    num_sets = min(num_sets, max(2, int(40e9 / (seen_blocks * block_bytes))))
    kv = torch.empty(
        (2, num_sets * seen_blocks + 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim), dtype=torch.bfloat16, device=DEVICE
    ).normal_()
    orders = torch.randperm(num_sets * seen_blocks, device=DEVICE).int().view(num_sets, rows, width - first)
    made = []
    for order in orders:
        table = torch.full((rows, width), num_sets * seen_blocks, dtype=torch.int32, device=DEVICE)
        table[:, first:] = order
        made.append(_batch(shape, rows, table))
    return kv, made


def _batch(shape: Shape, rows: int, table: torch.Tensor) -> Batch:
    lens = torch.full((rows,), shape.context, dtype=torch.int32, device=DEVICE)
    nothing = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    return Batch(
        token_ids_T=nothing, positions_T=lens.long() - 1, slot_mapping_T=nothing, query_starts_B1=starts.to(DEVICE),
        context_lens_B=lens, block_table_BM=table, num_decodes=rows, max_query_len=1, max_context_len=shape.context,
        query_starts_host=starts.numpy(), window=shape.window,
    )  # fmt: skip


def time_us(shape: Shape, kernels: Any, kv: torch.Tensor, steps: list[Batch]) -> float:
    """Median microseconds of attention in a layer, over graph replays; what a step prepares once is not in it."""
    q = torch.randn(len(steps[0].context_lens_B), shape.heads, shape.head_dim, device=DEVICE, dtype=torch.bfloat16)
    sinks = torch.randn(shape.heads, device=DEVICE, dtype=torch.bfloat16) if shape.has_sinks else None
    form = AttentionForm(softcap=shape.softcap, sinks_H=sinks)
    for step in steps:
        kernels.prepare(step)
    repeats = max(1, 20 // len(steps))

    def launch() -> None:
        for _ in range(repeats):
            for step in steps:
                kernels.attend(q, kv, step, *([form] if form.features else []))

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (repeats * len(steps)))
    return statistics.median(times)


def contestants(shape: Shape, spec: AttentionSpec) -> dict[str, Any]:
    """Kernels by name, as far as they do this form."""
    found: dict[str, Any] = {"triton": TritonKernels(None, spec)}
    try:
        from hookline.plugins.kernels.flash_attn_backend import FlashAttnKernels
    except ImportError:
        return found
    if not shape.has_sinks:
        found["flash_attn"] = FlashAttnKernels(None, spec)
    return found


def main() -> None:
    """Print a line for each shape and kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--only", default="", help="shapes whose name has this")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), f"{options.rows} rows, blocks of {BLOCK_SIZE}, bfloat16", flush=True)
    for shape in (shape for shape in SHAPES if options.only in shape.name):
        kv, steps = batches(shape, options.rows)
        spec = AttentionSpec(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            BLOCK_SIZE,
            options.rows,
            1 << 14,
            1 << 14,
            DEVICE,
            torch.bfloat16,
        )
        num_bytes = options.rows * shape.seen * 2 * shape.kv_heads * shape.head_dim * 2
        for name, kernels in contestants(shape, spec).items():
            fresh = [replace(step, scratch={}) for step in steps]
            spent = time_us(shape, kernels, kv, fresh)
            print(f"{shape.name:42} {name:10} {spent:8.1f} us {num_bytes / spent / 1e6:6.2f} TB/s", flush=True)
        del kv, steps
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
