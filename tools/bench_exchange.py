"""Sums over ranks of a few rows, each with the norm that follows: nccl, torch's symmetric memory and the exchange.

python tools/bench_exchange.py [NUM_GPUS] [WIDTH] [ROWS,...]: microseconds a call in a CUDA graph of many, bfloat16,
rank 0's clock, after checking each against a float32 sum, and many exchanges of all kinds in a random order. Torch's
one-shot and two-shot run without multicast. "2048:" and the like are products of so many inputs with one of many
matrices, then the plain norm, the sum, or its tiles sent to the sum.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.distributed.distributed_c10d import PrefixStore
from torch.multiprocessing.spawn import spawn

from hookline.core.contracts import AttentionSpec
from hookline.core.distributed.cuda_driver import Driver
from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS, Heartbeat
from hookline.core.distributed.peer_memory import share_memory
from hookline.core.distributed.process_group import connect
from hookline.core.distributed.ranks import LocalRanks
from hookline.plugins.kernels.norms.triton_norms import add_rms_norm
from hookline.plugins.kernels.peer_memory import triton_sums
from hookline.plugins.kernels.peer_memory.triton_slots import Way
from hookline.plugins.kernels.products import triton_wide
from hookline.plugins.kernels.products.triton_wide import empty_with_room
from hookline.plugins.kernels.triton_backend import TritonKernels

ROWS = (1, 8, 32, 64, 96, 128, 192, 256, 512, 1024)
MOST_ROWS = max(ROWS)
CALLS, REPLAYS = 64, 20
BY_ROWS = "rows"
WAYS = (*Way, BY_ROWS)
MIXED = 300
"""Exchanges in a random order."""
MATRICES = 8
VARIANTS: list[Any] = [tuple(map(int, one.split(","))) for one in os.environ.get("VARIANTS", "").split()]
"""Warps and registers to try beside the module's own, as `VARIANTS="16,64 8,96"`."""


def us_a_call(call, device):
    """Median over replays."""
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return sorted(times)[len(times) // 2]


def check_mixed(exchange, rank, size, width, device):
    """Sums of all sizes and types in all ways, and draws, on ranks of which each is late at times."""
    common, own = random.Random(0), random.Random(rank)
    default, results = exchange.way, []
    for number in range(MIXED):
        rows, way = common.choice((1, 3, 16, 40, 100, 300)), common.choice(WAYS)
        dtype = common.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
        columns = common.choice((width, width // 4, 48)) // (2 if dtype == torch.float32 else 1)
        exchange.way = lambda num_rows, way=way: way
        generators = [torch.Generator(device).manual_seed(number * size + peer) for peer in range(size)]
        parts = [torch.randn(rows, columns, generator=one, device=device).to(dtype) for one in generators]
        if own.random() < 0.3:
            torch.cuda._sleep(own.randrange(200_000))
        expected = torch.zeros(rows, columns, device=device)
        for part in parts:
            expected += part.float()
        if way == BY_ROWS:
            summed, weight = torch.zeros(rows, columns, device=device, dtype=dtype), torch.ones(columns, device=device)
            exchange.add_rms_norm_own(parts[rank].clone(), summed, weight.to(dtype), 1e-6)
            results.append((summed[rank::size], expected.to(dtype)[rank::size]))
        else:
            results.append((exchange.all_reduce(parts[rank].clone()), expected.to(dtype)))
        scores = torch.stack([part[:, 0].float() for part in parts])
        tokens = torch.arange(rows, device=device) + 1000 * torch.arange(size, device=device)[:, None]
        best = exchange.best_tokens(scores[rank].contiguous(), tokens[rank].contiguous())
        results.append((best, tokens.gather(0, scores.argmax(0, keepdim=True))[0]))
    exchange.way = default
    torch.cuda.synchronize()
    wrong = [number for number, (found, expected) in enumerate(results) if not torch.equal(found, expected)]
    assert not wrong, (rank, wrong[:10])


def normed_sum(exchange, way, x, residual, weight):
    """The norm and the residual; by rows the latter is right in this rank's rows alone."""
    if way == BY_ROWS:
        return exchange.add_rms_norm_own(x, residual, weight, 1e-6), residual
    exchange.way = lambda num_rows: way
    return exchange.add_rms_norm(x, residual, weight, 1e-6)


def check_way(exchange, way, own, total, residual, weight, rank, size):
    """A sum near the float32 one, its norm near the plain one, and both the same bits on all ranks."""
    if way != BY_ROWS:
        exchange.way = lambda num_rows: way
    summed = exchange.all_reduce(own.clone())
    error = ((summed.float() - total).norm() / total.norm()).item()
    assert error < 4e-3, error
    normed, added = normed_sum(exchange, way, own.clone(), residual.clone(), weight)
    expected, expected_added = add_rms_norm(summed.clone(), residual.clone(), weight, 1e-6)
    known = slice(rank, None, size) if way == BY_ROWS else slice(None)
    assert torch.equal(added[known], expected_added[known])
    torch.testing.assert_close(normed, expected, rtol=1e-2, atol=1e-2)
    for result in (summed, normed):
        everyone = [torch.empty_like(result) for _ in range(size)]
        dist.all_gather(everyone, result)
        assert all(torch.equal(everyone[0], one) for one in everyone)


def time_ways(exchange, own, residual, weight, device):
    """Each way of the exchange, and its variants."""
    x, r, found = own.clone(), residual.clone(), {}
    default, own_launches = exchange.way, (triton_sums.LAUNCHES, triton_sums.LAUNCHES_BY_ROWS)
    for way in WAYS:
        for variant in (None, *VARIANTS):
            if variant is not None:
                launches = dict.fromkeys(Way, variant), dict.fromkeys((1, 2), variant)
                triton_sums.LAUNCHES, triton_sums.LAUNCHES_BY_ROWS = launches
            name = (way if way == BY_ROWS else way.value) + ("" if variant is None else str(variant))
            found[name] = us_a_call(lambda way=way: normed_sum(exchange, way, x, r, weight), device)
        triton_sums.LAUNCHES, triton_sums.LAUNCHES_BY_ROWS = own_launches
    exchange.way = default
    return found


def time_products(exchange, kernels, width, residual, weight, device):
    """A product of each input size with the plain norm, with the sum after it, and with its tiles sent to the sum."""
    rows, columns = residual.shape
    inner = empty_with_room(rows, width, like=residual).normal_()
    matrices = [torch.randn(columns, width, device=device).bfloat16() for _ in range(MATRICES)]
    r = residual.clone()

    def calls(call):
        return us_a_call(lambda: [call(matrix) for matrix in matrices], device) / MATRICES

    def linear(matrix):
        return kernels.linear(inner, matrix, None)

    def sent(matrix):
        return exchange.linear_add_rms_norm(inner, matrix, None, r, weight, 1e-6)

    found = {
        "norm": calls(lambda matrix: add_rms_norm(linear(matrix), r, weight, 1e-6)),
        "sum": calls(lambda matrix: exchange.add_rms_norm(linear(matrix), r, weight, 1e-6)),
        BY_ROWS: calls(lambda matrix: exchange.add_rms_norm_own(linear(matrix), r, weight, 1e-6)),
    }
    default = triton_wide.most_sending_rows
    triton_wide.most_sending_rows = lambda width: MOST_ROWS
    if sent(matrices[0]) is not None:
        check_sent(exchange, kernels, inner, matrices[0], residual, weight)
        found["sent"] = calls(sent)
    triton_wide.most_sending_rows = default
    return found


def check_sent(exchange, kernels, inner, matrix, residual, weight):
    """Near the same by two launches, and the same bits on all ranks."""
    normed, added = exchange.linear_add_rms_norm(inner, matrix, None, residual.clone(), weight, 1e-6)
    expected = exchange.add_rms_norm(kernels.linear(inner, matrix, None), residual.clone(), weight, 1e-6)
    for one, other in zip((normed, added), expected, strict=True):
        error = ((one.float() - other.float()).norm() / other.float().norm()).item()
        assert error < 8e-3, error
    everyone = [torch.empty_like(normed) for _ in range(exchange.peers.size)]
    dist.all_gather(everyone, normed)
    assert all(torch.equal(everyone[0], one) for one in everyone)


def time_others(ranks, shared, name, own, residual, weight, device):
    """nccl, the norm alone, and torch's sums without a norm."""
    x, r = own.clone(), residual.clone()
    found = {
        "nccl,norm": us_a_call(lambda: add_rms_norm(ranks.all_reduce(x), r, weight, 1e-6), device),
        "norm": us_a_call(lambda: add_rms_norm(x, r, weight, 1e-6), device),
    }
    if shared is not None:
        part = shared[: own.numel()].view(own.shape)
        found["torch1"] = us_a_call(lambda: torch.ops.symm_mem.one_shot_all_reduce(part, "sum", name), device)
        found["torch2"] = us_a_call(lambda: torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", name), device)
    return found


def check_let_go(exchange, rank, device):
    """Rank 0 waits for others that never come, until it is let go."""
    x, weight = torch.ones(8, 1024, device=device), torch.ones(1024, device=device)
    for way in WAYS:  # once with all, so that nothing is loaded while a kernel waits
        normed_sum(exchange, way, x, x.clone(), weight)
    torch.cuda.synchronize(device)
    dist.barrier()
    torch.cuda.synchronize(device)
    if rank == 0:
        watchdog = threading.Timer(10, lambda: (print("rank 0 was not let go", flush=True), os._exit(1)))
        watchdog.start()
        for way in WAYS:
            normed_sum(exchange, way, x, x.clone(), weight)
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            exchange.peers.let_go()
        torch.cuda.synchronize(device)
        watchdog.cancel()
    dist.barrier()


def work(rank, size, width, row_counts, port):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=device)
    store = dist.distributed_c10d._get_default_store()
    heartbeat = Heartbeat(np.zeros(HEARTBEAT_WORDS * size, dtype=np.int64), rank)
    ranks = connect(PrefixStore("bench", store), LocalRanks(rank, size), device, heartbeat)
    spec = AttentionSpec(64 // size, 8 // size, 128, 16, 16, MOST_ROWS, 4096, device, torch.bfloat16)
    kernels = TritonKernels(None, spec)
    peers = share_memory(ranks, MOST_ROWS, width * 2, device, Driver())
    assert peers is not None, "the GPUs cannot reach each other's memory"
    exchange: Any = kernels.exchange(peers)
    weight = torch.rand(width, device=device).bfloat16()
    dist.broadcast(weight, 0)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    try:
        shared = symmetric.empty(MOST_ROWS * width, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared, name)
    except Exception as error:
        shared = None
        print("torch's symmetric memory:", error)
    check_mixed(exchange, rank, size, width, device)
    for rows in row_counts:
        own, residual = (torch.randn(rows, width, device=device).bfloat16() for _ in range(2))
        dist.broadcast(residual, 0)
        total = own.float()
        dist.all_reduce(total)
        default = exchange.way
        for way in WAYS:
            check_way(exchange, way, own, total, residual, weight, rank, size)
        exchange.way = default
        found = time_ways(exchange, own, residual, weight, device)
        found |= time_others(ranks, shared, name, own, residual, weight, device)
        if rows <= 512:
            for inner in (8192 // size, 25600 // size):  # of Qwen3-32B's output and down projections
                times = time_products(exchange, kernels, inner, residual, weight, device)
                found |= {f"{inner}:{key}": us for key, us in times.items()}
        if rank == 0:
            print(f"tp={size} rows {rows:3}: " + "  ".join(f"{key} {us:.1f}" for key, us in found.items()), flush=True)
    check_let_go(exchange, rank, device)
    if rank == 0:
        print(f"tp={size}: a rank alone was let go", flush=True)
    os._exit(0)


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    width = int(sys.argv[2]) if len(sys.argv) > 2 else 5120
    row_counts = [int(count) for count in sys.argv[3].split(",")] if len(sys.argv) > 3 else ROWS
    spawn(work, (size, width, row_counts, 29500 + size), nprocs=size)
