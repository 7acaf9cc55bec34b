"""Looks for cuBLASLt's fastest algorithm at given products, hot, beside what torch takes; one Hopper card.

    python tools/tune_products.py 256,384 25600x5120 5120x12800            # rows, then output x input features
    python tools/tune_products.py 256,384 25600x5120 5120x12800 --tiles 60 # of more tiles than the rule's best three

Every cluster and variant that cuBLASLt has of the rule's best tiles (plugins/kernels/products/cublaslt.py) is launched
a few times; the fastest, and what the rule takes, are then run for longer, in turn with torch's, at the clock that the
card's power limit leaves, with several weights in turn. Results are checked against torch's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hookline.plugins.kernels.products.cublaslt import Algorithm, CublasLt, cublaslt, filling_algorithms, filling_tiles

DEVICE = torch.device("cuda", 0)
WEIGHT_BYTES = 800e6
"""Of all weights in turn: far more than the L2 cache holds."""
CLUSTERS = {2: "1x1", 3: "2x1", 4: "4x1", 5: "1x2", 6: "2x2", 8: "1x4"}
VARIANTS = range(8)
ROUNDS = 4


def captured(call: Callable[[Tensor], object], weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    """One call with each weight; launched one by one, short products would wait for the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight_OD in weights:
            call(weight_OD)
    return graph


def timed(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Microseconds a replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats * 1000


def tune(lt: CublasLt, num_rows: int, num_out: int, width: int, num_tiles: int, top: int) -> None:
    """Search one product and print what was found."""
    num_weights = max(2, int(WEIGHT_BYTES / (2 * num_out * width)))
    weights = [torch.randn(num_out, width, device=DEVICE).bfloat16() * width**-0.5 for _ in range(num_weights)]
    x_TD = torch.randn(num_rows, width, device=DEVICE).bfloat16()

    def torchs(weight_OD: Tensor) -> Tensor:
        return functional.linear(x_TD, weight_OD)

    product = lt.product(x_TD, weights[0])

    expected_TO = torchs(weights[0])
    torch_graph = captured(torchs, weights)
    timed(torch_graph, 20)
    torch_us = min(timed(torch_graph, 5) for _ in range(3))
    start, good = time.perf_counter(), []
    tiles = filling_tiles(num_rows, num_out, lt.num_sms, num_tiles)
    rules = next(filter(product.kernel, filling_algorithms(num_rows, num_out, lt.num_sms)), None)
    tried = [Algorithm(*tile, *others) for tile, *others in itertools.product(tiles, CLUSTERS, VARIANTS)]
    for algorithm in dict.fromkeys([rules, *tried] if rules else tried):
        kernel = product.kernel(algorithm)
        if kernel is None:
            continue
        out_TO = product.launch(kernel, x_TD, weights[0])  # the first launch loads it
        graph = captured(partial(product.launch, kernel, x_TD), weights)
        few_us = min(timed(graph, 1) for _ in range(3))
        error = ((out_TO - expected_TO).float().norm() / expected_TO.float().norm()).item()
        assert error < 1e-2, (algorithm, error)
        name = f"{algorithm.features}x{algorithm.rows} {CLUSTERS[algorithm.cluster]} {algorithm.variant}"
        good.append((few_us, name + " *" * (algorithm == rules), graph))
    searched_s = time.perf_counter() - start
    entries = [(torch_us, "torch", torch_graph), *good[: rules is not None]]
    entries += sorted(good[rules is not None :], key=lambda one: one[0])[:top]
    hot: dict[str, list[float]] = {}
    for number in range(ROUNDS):  # to and fro, for a card grows hotter by and by
        for few_us, name, graph in entries[:: -1 if number % 2 else 1]:
            timed(graph, int(60e3 / few_us))
            hot.setdefault(name, []).append(timed(graph, int(100e3 / few_us)))
    base_us = statistics.median(hot["torch"])
    print(
        f"{num_rows} x {num_out} x {width}: {len(tried)} tried, {len(good)} found, {searched_s:.1f} s; torch "
        f"{base_us / num_weights:.1f} us (few: {torch_us / num_weights:.1f})"
    )
    for few_us, name, _ in sorted(entries[1:], key=lambda entry: statistics.median(hot[entry[1]])):
        hot_us = statistics.median(hot[name])
        print(
            f"    {hot_us / base_us:.3f}  {hot_us / num_weights:.1f} us (few: {few_us / num_weights:.1f})  {name}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("shapes", nargs="+", type=lambda text: tuple(int(part) for part in text.split("x")))
    parser.add_argument("--tiles", type=int, default=3, help="how many tiles are tried, the rule's best first")
    parser.add_argument("--top", type=int, default=4, help="how many are run for longer")
    arguments = parser.parse_args()
    lt = cublaslt(DEVICE)
    if lt is None:
        raise SystemExit("needs a Hopper card and the cuBLASLt that comes with torch")
    for (num_out, width), num_rows in itertools.product(arguments.shapes, arguments.rows):
        tune(lt, num_rows, num_out, width, arguments.tiles, arguments.top)


if __name__ == "__main__":
    main()
