"""Times products with weights in e4m3 beside those in bfloat16, of which no line is in the L2 cache; one GPU.

    python tools/bench_scaled.py                                  # the products of Qwen3-8B
    python tools/bench_scaled.py --rows 1,32 --blocks 5120x25600  # of this output x input features, scales of blocks

A line for each product and number of rows: microseconds of both, as the engine computes them (rounding of rows
included), their ratio, and the share of the card's bandwidth with which the weight in e4m3 was read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import FP8, AttentionSpec, ScaledMatrix, Scheme
from hookline.plugins.kernels.triton_backend import TritonKernels

DEVICE = torch.device("cuda", 0)
SHAPES = ("6144x4096", "4096x4096", "2x12288x4096", "4096x12288")
"""Of Qwen3-8B: qkv, output, gate and up with SiLU, down."""
WEIGHT_BYTES = 600e6
"""Of all weights in turn: far more than the L2 cache holds."""
BYTES_PER_S = 3.35e12
"""What an H100 is said to read."""
ROUNDS = 5


def timed(call: Callable[[int], object], number: int) -> float:
    """Microseconds a call, of calls with each weight in turn, in a graph."""
    for index in range(2):
        call(index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(number):
            call(index)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    best_ms = float("inf")
    for _ in range(ROUNDS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return best_ms / number * 1000


def compare(kernels: TritonKernels, shape: str, counts: Sequence[int], scheme: Scheme) -> None:
    """Print the lines of one product."""
    *silu, num_out, width = map(int, shape.split("x"))
    num_out *= 2 if silu else 1
    num_weights = max(3, int(WEIGHT_BYTES / num_out / width))
    quantised: list[Any] = []
    plain: list[Tensor] = []
    for _ in range(num_weights):
        weight_OD = torch.randn(num_out, width, device=DEVICE)
        blocks = -(-num_out // scheme.rows), -(-width // (scheme.columns or width))
        scales_RC = torch.full(blocks, width**-0.5 / 60, device=DEVICE)
        data_OD = (weight_OD * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        quantised.append(kernels.prepare_weight(ScaledMatrix(scheme, num_out, width, data_OD, scales_RC)))
        if len(plain) < num_weights // 2 + 1:
            plain.append((weight_OD * width**-0.5).bfloat16())
    for num_rows in counts:
        x_TD = torch.randn(max(num_rows, 128), width, device=DEVICE).bfloat16()[:num_rows]

        def of_plain(index: int, x_TD: Tensor = x_TD) -> Tensor:
            weight_OD = plain[index % len(plain)]
            return kernels.linear_silu_mul(x_TD, weight_OD) if silu else kernels.linear(x_TD, weight_OD, None)

        def of_quantised(index: int, x_TD: Tensor = x_TD) -> Tensor:
            if silu:
                return kernels.quantized_linear_silu_mul(x_TD, quantised[index])
            return kernels.quantized_linear(x_TD, quantised[index], None)

        plain_us, quantised_us = timed(of_plain, len(plain)), timed(of_quantised, num_weights)
        share = num_out * width / quantised_us * 1e6 / BYTES_PER_S
        print(
            f"{shape:>12} {num_rows:6} rows  bf16 {plain_us:7.1f} us  e4m3 {quantised_us:7.1f} us  "
            f"{plain_us / quantised_us:5.2f}x  {100 * share:3.0f} %",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, help="output x input features; 2x before: gate and up")
    parser.add_argument("--rows", default="1,2,8,16,32,64,128,256,512,2048,16384")
    parser.add_argument("--blocks", action="store_true", help="a scale for each 128 x 128 values, not for each output")
    parser.add_argument("--widened", action="store_true", help="rows stay as they are")
    options = parser.parse_args()
    counts = [int(count) for count in options.rows.split(",")]
    rows, columns = (128, 128) if options.blocks else (1, 0)
    scheme = Scheme(FP8, rows, columns, activations="" if options.widened else "dynamic")
    spec = AttentionSpec(32, 8, 128, 64, 512, 16384, 4096, DEVICE, torch.bfloat16)
    with torch.inference_mode():
        kernels = TritonKernels(None, spec)
        for shape in options.shapes or SHAPES:
            compare(kernels, shape, counts, scheme)


if __name__ == "__main__":
    main()
