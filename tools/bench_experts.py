"""Times a layer's experts on one GPU: the Triton products, plain torch in two ways, and the floor that memory sets.

    python tools/bench_experts.py                  # Qwen3-30B-A3B's layer: 128 experts, 8 a token, 2048 x 768, bfloat16
    python tools/bench_experts.py --sweep          # many tilings, to choose by; --compile before it saves time

Figures are medians of graph replays over several layers' weights in turn, so that the L2 does not hold them; the loop
of plain torch asks the host which experts are wanted and is timed without a graph. The floor counts the weights of the
experts that were chosen, at the rate of a large copy. Legend: as in plugins/kernels/triton_experts.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch
from torch import Tensor

from hookline.core.layers import every_expert, wanted_experts
from hookline.plugins.kernels.triton_experts import Tiling, expert_mlp, group_by_expert, route_experts, tiling

NUM_EXPERTS, NUM_CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
NUM_LAYERS = 3
SWEPT = {
    1: ((16,), (16, 32, 64), (128, 256), (4,), (3, 4)),
    32: ((16,), (32, 64), (64, 128), (4,), (3, 4)),
    256: ((16, 32), (32, 64), (64, 128), (4,), (3,)),
    16384: ((128,), (64, 128), (64,), (4, 8), (3,)),
}
"""Tokens -> pairs of a tile, columns, depth, warps, stages."""

Layer = tuple[Tensor, Tensor]
Case = tuple[Tensor, list[tuple[Tensor, Tensor]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time many tilings")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 32, 256, 2048, 16384])
    parser.add_argument("--compile", action="store_true", help="only compile what a sweep needs")
    options = parser.parse_args()
    if options.compile:
        return compile_all()
    layers, rate = make_layers(), copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s", flush=True)
    for num_tokens in options.tokens:
        case = make_case(num_tokens)
        if options.sweep and num_tokens in SWEPT:
            sweep(num_tokens, layers, case)
        report(num_tokens, layers, case, rate)


def make_layers() -> list[Layer]:
    shapes = ((NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER))
    return [
        tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02) for shape in shapes)  # type: ignore[misc]
        for _ in range(NUM_LAYERS)
    ]


def make_case(num_tokens: int) -> Case:
    """Tokens, and for each layer another random routing."""
    x_TD = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    logits = [torch.randn(num_tokens, NUM_EXPERTS, device="cuda") for _ in range(NUM_LAYERS)]
    return x_TD, [route_experts(logits_TX, NUM_CHOSEN, True) for logits_TX in logits]


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


def timed_eagerly(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds a call on the host's clock, for what cannot be captured."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) * 1e6 / len(calls))
    return statistics.median(found[1:])


def calls_of(compute: Callable[..., Tensor], layers: list[Layer], case: Case) -> list[Callable[[], Tensor]]:
    x_TD, routes = case
    return [partial(compute, x_TD, *route, *layer) for layer, route in zip(layers, routes, strict=True)]


def report(num_tokens: int, layers: list[Layer], case: Case, rate: float) -> None:
    x_TD, routes = case
    chosen = statistics.mean(len(expert_TA.unique()) for expert_TA, _ in routes)
    num_bytes = chosen * 3 * HIDDEN * INNER * 2 + 4 * num_tokens * HIDDEN
    flops = num_tokens * NUM_CHOSEN * 6 * HIDDEN * INNER
    triton_us = timed(calls_of(expert_mlp, layers, case))
    out_TD, expected_TD = expert_mlp(x_TD, *routes[0], *layers[0]), every_expert(x_TD, *routes[0], *layers[0])
    error = float((out_TD.float() - expected_TD.float()).norm() / expected_TD.float().norm())
    logits_TX = torch.randn(num_tokens, NUM_EXPERTS, device="cuda", dtype=torch.bfloat16)
    block_m = tiling(num_tokens * NUM_CHOSEN, NUM_EXPERTS, 2).block_m
    parts = {
        "route": timed([lambda: route_experts(logits_TX, NUM_CHOSEN, True)] * 8),
        "group": timed([lambda: group_by_expert(routes[0][0], NUM_EXPERTS, block_m)] * 8),
        "loop": timed_eagerly(calls_of(wanted_experts, layers, case)),
        "every": timed(calls_of(every_expert, layers, case), 3) if num_tokens <= 256 else float("nan"),
    }
    print(
        f"{num_tokens:6} tokens, {chosen:5.1f} experts: triton {triton_us:8.1f} us, floor {num_bytes / rate * 1e6:.1f},"
        f" {num_bytes / triton_us / 1e6:5.2f} TB/s, {flops / triton_us / 1e6:6.1f} TFLOP/s, error {error:.1e}; "
        + ", ".join(f"{name} {value:.1f}" for name, value in parts.items()),
        flush=True,
    )


def swept_cuts(num_tokens: int) -> list[Tiling]:
    """Each product's cuts in turn, with the other one's as shipped."""
    shipped, cuts = tiling(num_tokens * NUM_CHOSEN, NUM_EXPERTS, 2), []
    for block_m, block_n, block_k, num_warps, num_stages in product(*SWEPT[num_tokens]):
        cut = (block_n, block_k, num_warps, num_stages)
        cuts += [Tiling(block_m, cut, shipped.down), Tiling(block_m, shipped.gate_up, cut)]
    return cuts


def sweep(num_tokens: int, layers: list[Layer], case: Case) -> None:
    """The fastest few cuts of each product."""
    shipped, found = tiling(num_tokens * NUM_CHOSEN, NUM_EXPERTS, 2), []
    for cut in swept_cuts(num_tokens):
        try:
            found.append((timed(calls_of(partial(expert_mlp, cut=cut), layers, case), 5), cut))
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


def compile_all() -> None:
    """Compile what a sweep needs, in many processes; it lands in Triton's cache."""
    jobs = [(num_tokens, cut) for num_tokens in SWEPT for cut in swept_cuts(num_tokens)]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=1))


def compile_one(num_tokens: int, cut: Tiling) -> None:
    x_TD = torch.zeros(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    gate_up_XFD, down_XDF = (
        torch.zeros(shape, device="cuda", dtype=torch.bfloat16).expand(NUM_EXPERTS, *shape)
        for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    routed = route_experts(torch.randn(num_tokens, NUM_EXPERTS, device="cuda"), NUM_CHOSEN, True)
    try:
        expert_mlp(x_TD, *routed, gate_up_XFD, down_XDF, cut)
        torch.cuda.synchronize()
    except Exception as error:  # too large for the card; the sweep says so
        print(f"  {cut}: {type(error).__name__}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
