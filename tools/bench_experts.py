"""Times a layer's experts on one GPU: the Triton products, plain torch, and the floor that memory sets.

    python tools/bench_experts.py                  # Qwen3-30B-A3B's layer: 128 experts, 8 a token, 2048 x 768, bfloat16
    python tools/bench_experts.py --sweep          # many tilings, to choose by; --compile before it saves time
    python tools/bench_experts.py --model gpt_oss  # 32 experts with biases, 4 a token, 2880 x 2880; or qwen3_next

Figures are medians of graph replays over several layers' weights in turn, so that the L2 does not hold them. The floor
counts the weights of the experts that were chosen, at the rate of a large copy. Legend: as in
plugins/kernels/experts/triton_experts.py.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from hookline.core.layers import every_expert, plain_clamped_expert_mlp
from hookline.plugins.kernels.experts.triton_experts import clamped_expert_mlp, expert_mlp
from hookline.plugins.kernels.experts.triton_routing import (
    Tiling,
    clamped_tiling,
    group_by_expert,
    route_experts,
    tiling,
)

NUM_LAYERS = 3
ALPHA, LIMIT = 1.702, 7.0
SWEPT = {
    1: ((16,), (16, 32, 64), (128, 256), (4,), (3, 4)),
    32: ((16,), (32, 64), (64, 128), (4,), (3, 4)),
    256: ((16, 32), (32, 64), (64, 128), (4,), (3,)),
    16384: ((128,), (64, 128), (64,), (4, 8), (3,)),
}
"""Tokens -> pairs of a tile, columns, depth, warps, stages."""
CLAMPED_SWEPT = {
    1: ((16,), (16, 32, 64), (128,), (4,), (3, 4)),
    32: ((16, 32), (32, 64), (64, 128), (4,), (4,)),
    256: ((32, 64), (64, 128), (64,), (4, 8), (3, 4)),
    16384: ((128,), (64, 128), (64,), (4, 8), (3,)),
}
"""The same for few large experts."""


@dataclass(frozen=True)
class Shape:
    """A layer's experts: how many, how many of them a token takes, their features, and whether they are gpt-oss's."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    is_clamped: bool = False

    def mlp(self, *given: Any, cut: Tiling | None = None) -> Tensor:
        """The Triton kernels."""
        compute: Any = partial(clamped_expert_mlp, alpha=ALPHA, limit=LIMIT) if self.is_clamped else expert_mlp
        return compute(*given, cut=cut)

    def every(self, *given: Any) -> Tensor:
        """Plain torch, all experts for all tokens."""
        compute: Any = partial(plain_clamped_expert_mlp, alpha=ALPHA, limit=LIMIT) if self.is_clamped else every_expert
        return compute(*given)

    def tiling(self, num_tokens: int) -> Tiling:
        """As shipped, for bfloat16."""
        choose = clamped_tiling if self.is_clamped else tiling
        return choose(num_tokens * self.num_chosen, self.num_experts, 2)

    def weights(self) -> list[tuple[int, ...]]:
        """Shapes of gate_up and down of one expert, each with its bias if there is one."""
        gate_up, down = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        return [gate_up, gate_up[:1], down, down[:1]] if self.is_clamped else [gate_up, down]


SHAPES = {
    "qwen3_30b_a3b": Shape(128, 8, 2048, 768),
    "qwen3_next": Shape(512, 10, 2048, 512),
    "gpt_oss": Shape(32, 4, 2880, 2880, is_clamped=True),
}
Layer = tuple[Tensor, ...]
Case = tuple[Tensor, list[tuple[Tensor, Tensor]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time many tilings")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 32, 256, 2048, 16384])
    parser.add_argument("--compile", action="store_true", help="only compile what a sweep needs")
    parser.add_argument("--model", choices=SHAPES, default="qwen3_30b_a3b", help="whose layer")
    options = parser.parse_args()
    shape = SHAPES[options.model]
    if options.compile:
        return compile_all(shape)
    layers, rate = make_layers(shape), copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s", flush=True)
    for num_tokens in options.tokens:
        case = make_case(shape, num_tokens)
        if options.sweep and num_tokens in SWEPT:
            sweep(shape, num_tokens, layers, case)
        report(shape, num_tokens, layers, case, rate)


def make_layers(shape: Shape) -> list[Layer]:
    return [
        tuple(
            torch.randn((shape.num_experts, *sizes), device="cuda", dtype=torch.bfloat16).mul_(0.02)
            for sizes in shape.weights()
        )
        for _ in range(NUM_LAYERS)
    ]


def make_case(shape: Shape, num_tokens: int) -> Case:
    """Tokens, and for each layer another random routing."""
    x_TD = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    logits = [torch.randn(num_tokens, shape.num_experts, device="cuda") for _ in range(NUM_LAYERS)]
    return x_TD, [route_experts(logits_TX, shape.num_chosen, True) for logits_TX in logits]


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randn(1 << 28, device="cuda")  # four bytes each: a copy of single bytes reached 2.8 TB/s on an H200
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed([lambda: target.copy_(source)]) * 1e-6)


def timed(calls: Sequence[Callable[[], object]], num_replays: int = 15) -> float:
    """Median microseconds a call, over graph replays of all calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(num_replays):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        found.append(events[0].elapsed_time(events[1]) * 1000 / len(calls))
    return statistics.median(found)


def calls_of(compute: Callable[..., Tensor], layers: list[Layer], case: Case) -> list[Callable[[], Tensor]]:
    x_TD, routes = case
    return [partial(compute, x_TD, *route, *layer) for layer, route in zip(layers, routes, strict=True)]


def report(shape: Shape, num_tokens: int, layers: list[Layer], case: Case, rate: float) -> None:
    x_TD, routes = case
    chosen = statistics.mean(len(expert_TA.unique()) for expert_TA, _ in routes)
    num_bytes = chosen * 3 * shape.hidden * shape.inner * 2 + 4 * num_tokens * shape.hidden
    flops = num_tokens * shape.num_chosen * 6 * shape.hidden * shape.inner
    triton_us = timed(calls_of(shape.mlp, layers, case))
    out_TD, expected_TD = shape.mlp(x_TD, *routes[0], *layers[0]), shape.every(x_TD, *routes[0], *layers[0])
    error = float((out_TD.float() - expected_TD.float()).norm() / expected_TD.float().norm())
    logits_TX = torch.randn(num_tokens, shape.num_experts, device="cuda", dtype=torch.bfloat16)
    block_m = shape.tiling(num_tokens).block_m
    parts = {
        "route": timed([lambda: route_experts(logits_TX, shape.num_chosen, True)] * 8),
        "group": timed([lambda: group_by_expert(routes[0][0], shape.num_experts, block_m)] * 8),
        "every": timed(calls_of(shape.every, layers, case), 3) if num_tokens <= 256 else float("nan"),
    }
    print(
        f"{num_tokens:6} tokens, {chosen:5.1f} experts: triton {triton_us:8.1f} us, floor {num_bytes / rate * 1e6:.1f},"
        f" {num_bytes / triton_us / 1e6:5.2f} TB/s, {flops / triton_us / 1e6:6.1f} TFLOP/s, error {error:.1e}; "
        + ", ".join(f"{name} {value:.1f}" for name, value in parts.items()),
        flush=True,
    )


def swept_cuts(shape: Shape, num_tokens: int) -> list[Tiling]:
    """Each product's cuts in turn, with the other one's as shipped."""
    shipped, cuts = shape.tiling(num_tokens), []
    swept = CLAMPED_SWEPT if shape.is_clamped else SWEPT
    for block_m, block_n, block_k, num_warps, num_stages in product(*swept[num_tokens]):
        cut = (block_n, block_k, num_warps, num_stages)
        cuts += [Tiling(block_m, cut, shipped.down), Tiling(block_m, shipped.gate_up, cut)]
    return cuts


def sweep(shape: Shape, num_tokens: int, layers: list[Layer], case: Case) -> None:
    """The fastest few cuts of each product."""
    shipped, found = shape.tiling(num_tokens), []
    for cut in swept_cuts(shape, num_tokens):
        try:
            found.append((timed(calls_of(partial(shape.mlp, cut=cut), layers, case), 5), cut))
        except Exception as error:
            print(f"  {cut}: {type(error).__name__}", flush=True)
    for part, other in (("gate_up", "down"), ("down", "gate_up")):
        mine = sorted(
            ((us, cut) for us, cut in found if getattr(cut, other) == getattr(shipped, other)), key=lambda pair: pair[0]
        )
        for us, cut in mine[:4]:
            print(
                f"  {num_tokens} tokens, {part}: {us:8.1f} us, block_m {cut.block_m}, {getattr(cut, part)}", flush=True
            )


def compile_all(shape: Shape) -> None:
    """Compile what a sweep needs, in many processes; it lands in Triton's cache."""
    jobs = [(shape, num_tokens, cut) for num_tokens in SWEPT for cut in swept_cuts(shape, num_tokens)]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=1))


def compile_one(shape: Shape, num_tokens: int, cut: Tiling) -> None:
    x_TD = torch.zeros(num_tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    weights = [
        torch.zeros(sizes, device="cuda", dtype=torch.bfloat16).expand(shape.num_experts, *sizes)
        for sizes in shape.weights()
    ]
    logits_TX = torch.randn(num_tokens, shape.num_experts, device="cuda")
    try:
        shape.mlp(x_TD, *route_experts(logits_TX, shape.num_chosen, True), *weights, cut=cut)
        torch.cuda.synchronize()
    except Exception as error:  # too large for the card; the sweep says so
        print(f"  {cut}: {type(error).__name__}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
