"""Sums over ranks of a few rows, each with the norm that follows: nccl, torch's symmetric memory and the exchange.

python tools/bench_exchange.py [NUM_GPUS] [WIDTH]: microseconds a call in a CUDA graph of many, bfloat16, rank 0's
clock, after checking each against a float32 sum. Torch's one-shot and two-shot run without multicast.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.multiprocessing

from core.parallel import Ranks
from core.peer_memory import share_memory
from core.process_ranks import connect
from core.pulse import PULSE_WORDS, Pulse
from plugins.kernels.triton_exchange import TritonExchange, Way
from plugins.kernels.triton_ops import add_rms_norm

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
CALLS, REPLAYS = 64, 20


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


def work(rank, size, width, port):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=device)
    store = dist.distributed_c10d._get_default_store()
    pulse = Pulse(np.zeros(PULSE_WORDS * size, dtype=np.int64), rank)
    ranks = connect(dist.PrefixStore("bench", store), Ranks(rank, size), device, pulse)
    peers = share_memory(ranks, 512, width * 2, device)
    exchange = TritonExchange(peers)
    weight = torch.rand(width, device=device).bfloat16()
    name = dist.group.WORLD.group_name
    try:
        shared = symmetric.empty(512 * width, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared, name)
    except Exception as error:
        shared = None
        print("torch's symmetric memory:", error)
    for rows in ROWS:
        own = torch.randn(rows, width, device=device).bfloat16()
        total = own.float()
        dist.all_reduce(total)
        x, residual = own.clone(), torch.randn(rows, width, device=device).bfloat16()

        def call_of(way, fused, x=x, residual=residual):
            def call():
                exchange.way = lambda num_rows: way
                if fused:
                    exchange.add_rms_norm(x, residual, weight, 1e-6)
                else:
                    add_rms_norm(exchange.all_reduce(x), residual, weight, 1e-6)

            return call

        found = {}
        for way in Way:
            exchange.way = lambda num_rows, way=way: way
            result = exchange.all_reduce(own.clone())
            error = ((result.float() - total).norm() / total.norm()).item()
            assert error < 4e-3, (way, rows, error)
            everyone = [torch.empty_like(result) for _ in range(size)]
            dist.all_gather(everyone, result)
            assert all(torch.equal(everyone[0], one) for one in everyone), (way, rows)
            found[way.value] = us_a_call(call_of(way, True), device)
        found["nccl+norm"] = us_a_call(
            lambda x=x, r=residual: add_rms_norm(ranks.all_reduce(x), r, weight, 1e-6), device
        )
        found["norm"] = us_a_call(lambda x=x, r=residual: add_rms_norm(x, r, weight, 1e-6), device)
        if shared is not None:
            part = shared[: rows * width].view(rows, width)
            for kind, op in (
                ("torch1", lambda part=part: torch.ops.symm_mem.one_shot_all_reduce(part, "sum", name)),
                ("torch2", lambda part=part: torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", name)),
            ):
                try:
                    found[kind] = us_a_call(op, device)
                except Exception as error:
                    found[kind] = float("nan")
                    print(kind, str(error)[:200])
        if rank == 0:
            print(
                f"tp={size} rows {rows:4}: " + "  ".join(f"{key} {value:6.1f}" for key, value in found.items()),
                flush=True,
            )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    width = int(sys.argv[2]) if len(sys.argv) > 2 else 5120
    torch.multiprocessing.spawn(work, (size, width, 29500 + size), nprocs=size)
