"""Prefills over ranks: Qwen3-32B's layers without attention, their sums over ranks beside or between the products.

python tools/bench_overlap.py [NUM_GPUS] [TOKENS ...]: milliseconds a layer of rank 0, bfloat16, by number of chunks,
for sums by nccl and by copies, after checking that all ranks have equal bits and chunks hardly change them. "alone"
leaves the sums out. Ways take turns, a quarter of a second each, since products slow down as the GPU warms up.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.multiprocessing.spawn import spawn

from hookline.core.contracts import AttentionSpec, Runtime
from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS, Heartbeat
from hookline.core.distributed.peer_ranks import with_copies
from hookline.core.distributed.process_group import ProcessRanks, connect
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.layers import Residual
from hookline.plugins.kernels.triton_backend import TritonKernels
from hookline.plugins.models.qwen3 import Qwen3

LAYERS, REPEATS, TURNS = 4, 8, 3
SHAPE = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=LAYERS, hidden_size=5120,
    num_attention_heads=64, num_key_value_heads=8, head_dim=128, intermediate_size=25600, vocab_size=1024,
    max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False,
)  # fmt: skip
CHUNKS = (1, 2, 3, 4)


class Switch:
    """Ranks that are others from time to time, and cut into so many chunks."""

    def __init__(self, now):
        self.now, self.count = now, 1

    def num_chunks(self, num_rows):
        return self.count

    def __getattr__(self, name):
        return getattr(self.now, name)


class Silent(ProcessRanks):
    """Ranks whose sums are left out."""

    def _sum(self, x):
        return x


def ms_of(call):
    """Of one of many calls in a row."""
    dist.barrier()
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPEATS


def chain(model, hidden_TD):
    """Qwen3.forward from the embedding on."""
    width = model.layers[0].qkv.num_heads * 128

    def attend(index, qkv_TC, rope, qk_norm):
        return qkv_TC[:, :width].contiguous()

    residual = Residual(hidden_TD.clone(), model.eps, model.runtime)
    for layer in model.layers:
        layer(residual, attend)
    return model.norm(residual)


def parts(model, tokens, say):
    """Each operation by itself, whole and a quarter of the rows."""
    layer, device = model.layers[0], torch.device("cuda", torch.cuda.current_device())
    for rows in (tokens, tokens // 2, tokens // 4):
        found = []
        for name, weight in (
            ("qkv", layer.qkv.weight_OD), ("output", layer.output.weight_OD),
            ("gate_up", layer.mlp.gate_up.weight_OD), ("down", layer.mlp.down.weight_OD),
        ):  # fmt: skip
            x = torch.randn(rows, weight.shape[1], device=device).bfloat16()
            ms = ms_of(lambda x=x, weight=weight: [model.runtime.kernels.linear(x, weight, None) for _ in range(4)]) / 4
            found.append(f"{name} {ms:.3f} ({2e-9 * rows * weight.numel() / ms:.0f} TFLOP/s)")
        wide = torch.randn(rows, layer.mlp.gate_up.weight_OD.shape[0], device=device).bfloat16()
        x, residual = (torch.randn(rows, 5120, device=device).bfloat16() for _ in range(2))
        for name, call in (
            ("silu_mul", partial(model.runtime.kernels.silu_mul, wide)),
            ("add_rms_norm", partial(model.runtime.kernels.add_rms_norm, x, residual, layer.attention_norm_D, 1e-6)),
        ):
            found.append(f"{name} {ms_of(lambda call=call: [call() for _ in range(4)]) / 4:.3f}")
        say(f"{rows} rows, ms: " + ", ".join(found))


@torch.inference_mode()
def work(rank, size, token_counts, port):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=device)
    store = dist.distributed_c10d._get_default_store()
    heartbeat = Heartbeat(np.zeros(HEARTBEAT_WORDS * size, dtype=np.int64), rank)
    nccl = connect(PrefixStore("bench", store), LocalRanks(rank, size), device, heartbeat)
    assert isinstance(nccl, ProcessRanks)
    spec = AttentionSpec(64 // size, 8 // size, 128, 16, 16, max(token_counts), 4096, device, torch.bfloat16)
    ways = {
        "alone": Silent(rank, size, nccl.group, heartbeat, side_stream=nccl.side_stream),
        "nccl": nccl,
        "copies": with_copies(nccl, spec, 5120),
    }
    switch: Any = Switch(nccl)
    model = Qwen3(SHAPE, Runtime(device, torch.bfloat16, switch, TritonKernels(None, spec)))
    generator = torch.Generator(device).manual_seed(1)
    for target in model.weight_targets().values():
        assert target.view is not None
        target.view.normal_(0, 0.02, generator=generator)

    def say(text):
        if rank == 0:
            print(f"tp={size}: {text}", flush=True)

    for tokens in token_counts:
        hidden_TD = torch.randn(tokens, 5120, device=device, generator=generator.manual_seed(7)).bfloat16()
        parts(model, tokens, say)
        compare(model, ways, switch, hidden_TD, say)
    dist.barrier()
    os._exit(0)


def compare(model, ways, switch, hidden_TD, say):
    """Check and time every way with every number of chunks."""
    cases = [(way, count) for way in ways for count in CHUNKS]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    reference_TD = None
    for turn in range(TURNS + 1):
        for case in cases:
            switch.now, switch.count = ways[case[0]], case[1]
            if turn == 0:
                out_TD = chain(model, hidden_TD)
                reference_TD = out_TD if case == ("nccl", 1) else reference_TD
                if case[0] != "alone":
                    check(case, out_TD, reference_TD)
            else:
                found[case].append(ms_of(lambda: chain(model, hidden_TD)) / LAYERS)
    for way in ways:
        medians = [f"{count}: {sorted(found[way, count])[TURNS // 2]:.3f}" for count in CHUNKS]
        say(f"{len(hidden_TD)} rows, {way:8} ms a layer by chunks  " + "  ".join(medians))


def check(case, out_TD, reference_TD):
    everyone = [torch.empty_like(out_TD) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, out_TD)
    assert all(torch.equal(everyone[0], one) for one in everyone), case
    error = ((out_TD.float() - reference_TD.float()).norm() / reference_TD.float().norm()).item()
    assert error < 2e-2, (case, error)


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    token_counts = [int(count) for count in sys.argv[2:]] or [16384]
    spawn(work, (size, token_counts, 29600 + size), nprocs=size)
