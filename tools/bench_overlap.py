"""Prefills over ranks: Qwen3-32B's layers without attention, their sums over ranks beside or between the products.

python tools/bench_overlap.py [NUM_GPUS] [TOKENS] [copies]: milliseconds a layer of rank 0, bfloat16, for numbers of
chunks and of nccl's thread blocks, after checking that all ranks have equal bits and chunks hardly change them. Rows
"alone" leave the sums out. With `copies` also what the GPUs' copy engines reach, alone and beside a product.
"""

from __future__ import annotations

import ctypes
import os
import sys
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from core import process_ranks
from core.aside import Aside
from core.contracts import AttentionSpec, Runtime
from core.parallel import Ranks
from core.peer_memory import _Driver
from core.process_ranks import ProcessRanks, c10d, connect
from core.pulse import PULSE_WORDS, Pulse
from core.rows import cut, whole
from plugins.kernels.triton_backend import TritonKernels
from plugins.models.qwen3 import Qwen3

LAYERS, REPEATS = 4, 5
SHAPE = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=LAYERS, hidden_size=5120,
    num_attention_heads=64, num_key_value_heads=8, head_dim=128, intermediate_size=25600, vocab_size=1024,
    max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False,
)  # fmt: skip
CHUNKS = (1, 2, 3, 4, 8)
BLOCKS = (None, 16, 8, 4)
"""Most thread blocks of an nccl kernel; None leaves it to nccl."""


class Switch:
    """Ranks that are others from time to time."""

    def __init__(self, now):
        self.now = now

    def __getattr__(self, name):
        return getattr(self.now, name)


class Silent(ProcessRanks):
    """Ranks whose sums are left out."""

    def _sum(self, x):
        return x

    def sums(self, partials):
        yield from list(partials)


def group(store, rank, size, blocks):
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(minutes=5)
    if blocks is not None:
        options.config.max_ctas = blocks
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def ms_of(call):
    times = []
    for repetition in range(REPEATS + 2):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if repetition > 1:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def chain(model, ranks, hidden_TD):
    """Qwen3.forward from the embedding on."""
    residual = cut(hidden_TD.clone(), ranks.num_chunks(len(hidden_TD)))
    norms = [*(layer.attention_norm_D for layer in model.layers), model.norm_D]
    normed = [model.kernels.rms_norm(chunk_TD, norms[0], model.eps) for chunk_TD in residual]
    width = model.layers[0].qkv.num_heads * 128

    def attend(layer, qkv_TC, rope, norm):
        return qkv_TC[:, :width].contiguous()

    for layer, next_norm_D in zip(model.layers, norms[1:], strict=True):
        normed = layer(normed, residual, next_norm_D, attend)
    return whole(normed)


def set_sm_target(count):
    """Tell cuBLAS how many of the multiprocessors are its own; 0 for all."""
    cublas = ctypes.CDLL("libcublas.so.13")
    code = cublas.cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), ctypes.c_int(count))
    assert code == 0, code


def parts(model, tokens, say):
    """Each operation by itself, whole and a quarter of the rows."""
    layer, device = model.layers[0], torch.device("cuda", torch.cuda.current_device())
    for rows in (tokens, tokens // 2, tokens // 4):
        found = []
        for name, weight in (
            ("qkv", layer.qkv.weight_OD), ("output", layer.output.weight_OD),
            ("gate_up", layer.gate_up.weight_OD), ("down", layer.down.weight_OD),
        ):  # fmt: skip
            x = torch.randn(rows, weight.shape[1], device=device).bfloat16()
            ms = ms_of(lambda x=x, weight=weight: [model.kernels.linear(x, weight, None) for _ in range(4)]) / 4
            found.append(f"{name} {ms:.3f} ({2e-9 * rows * weight.numel() / ms:.0f} TFLOP/s)")
        wide = torch.randn(rows, layer.gate_up.weight_OD.shape[0], device=device).bfloat16()
        x, residual = (torch.randn(rows, 5120, device=device).bfloat16() for _ in range(2))
        for name, call in (
            ("silu_mul", partial(model.kernels.silu_mul, wide)),
            ("add_rms_norm", partial(model.kernels.add_rms_norm, x, residual, layer.attention_norm_D, 1e-6)),
        ):
            found.append(f"{name} {ms_of(lambda call=call: [call() for _ in range(4)]) / 4:.3f}")
        say(f"{rows} rows, ms: " + ", ".join(found))


def copies(ranks, model, tokens, say):
    """The copy engines: rows pushed to every other rank, alone and while this rank multiplies."""
    rank, size = ranks.rank, ranks.size
    device, driver = torch.device("cuda", rank), _Driver()
    num_bytes = tokens * 5120 * 2 // size
    mine = driver.allocate(num_bytes * size)
    source = driver.allocate(num_bytes)
    handles_X = torch.frombuffer(bytearray(driver.handle(mine)), dtype=torch.uint8).to(device)
    handles = ranks.all_gather_last(handles_X.unsqueeze(0)).view(size, -1).cpu()
    others = [(rank + step) % size for step in range(1, size)]
    opened = {other: driver.open(bytes(handles[other].tolist())) for other in others}
    streams = {other: torch.cuda.Stream(device, priority=-1) for other in others}
    cuda, layer = driver._cuda, model.layers[0]
    x = torch.randn(tokens // 4, layer.gate_up.weight_OD.shape[1], device=device).bfloat16()

    def push(times):
        for other in others:
            streams[other].wait_stream(torch.cuda.current_stream())
        for _ in range(times):
            for other in others:
                code = cuda.cuMemcpyDtoDAsync_v2(
                    ctypes.c_uint64(opened[other] + rank * num_bytes), ctypes.c_uint64(source),
                    ctypes.c_size_t(num_bytes), ctypes.c_void_p(streams[other].cuda_stream),
                )  # fmt: skip
                assert code == 0, code

    def join():
        for other in others:
            torch.cuda.current_stream().wait_stream(streams[other])

    def multiply(times=8):
        for _ in range(times):
            model.kernels.linear(x, layer.gate_up.weight_OD, None)

    alone = ms_of(lambda: (push(4), join())) / 4
    product = ms_of(multiply)
    beside = ms_of(lambda: (push(16), multiply()))
    both = ms_of(lambda: (push(16), multiply(), join()))
    sent = num_bytes * len(others)
    say(
        f"copies of {sent >> 20} MiB to {len(others)}: {alone:.3f} ms, {sent / alone / 1e6:.0f} GB/s; 8 products alone "
        f"{product:.3f}, beside copies {beside:.3f}, with all 16 of them {both:.3f}"
    )
    summed = torch.randn(size, tokens // size, 5120, device=device).bfloat16()
    ms = ms_of(lambda: summed.sum(0))
    say(f"sum of {size} parts {ms:.3f} ms")


@torch.inference_mode()
def work(rank, size, tokens, with_copies, port):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=device)
    store = dist.distributed_c10d._get_default_store()
    pulse = Pulse(np.zeros(PULSE_WORDS * size, dtype=np.int64), rank)
    ranks = connect(dist.PrefixStore("bench", store), Ranks(rank, size), device, pulse)
    spec = AttentionSpec(64 // size, 8 // size, 128, 16, 16, tokens, 4096, device, torch.bfloat16)
    switch = Switch(ranks)
    model = Qwen3(SHAPE, Runtime(device, torch.bfloat16, switch, TritonKernels(None, spec)))
    generator = torch.Generator(device).manual_seed(1)
    for target in model.weight_targets().values():
        target.view.normal_(0, 0.02, generator=generator)
    hidden_TD = torch.randn(tokens, 5120, device=device, generator=torch.Generator(device).manual_seed(7)).bfloat16()
    process_ranks.LEAST_CHUNK_ROWS = 1

    def say(text):
        if rank == 0:
            print(f"tp={size}: {text}", flush=True)

    def measure(what, chunk_counts, reference=None):
        found = []
        for count in chunk_counts:
            process_ranks.MOST_CHUNKS = count
            if reference is not None:
                out = chain(model, switch, hidden_TD)
                everyone = [torch.empty_like(out) for _ in range(size)]
                dist.all_gather(everyone, out)
                assert all(torch.equal(everyone[0], one) for one in everyone), (what, count)
                error = ((out.float() - reference.float()).norm() / reference.float().norm()).item()
                assert error < 2e-2, (what, count, error)
                del everyone, out
            ms = ms_of(lambda: chain(model, switch, hidden_TD)) / LAYERS
            found.append(f"{count}: {ms:.3f}")
        say(f"{what:28} ms a layer by chunks  " + "  ".join(found))

    parts(model, tokens, say)
    switch.now = Silent(rank, size, ranks.group, pulse, aside=ranks.aside)
    measure("alone", CHUNKS)
    switch.now, process_ranks.MOST_CHUNKS = ranks, 1
    reference = chain(model, switch, hidden_TD)
    for blocks in BLOCKS:
        try:
            made = group(dist.PrefixStore(f"b{blocks}", store), rank, size, blocks)
            switch.now = ProcessRanks(rank, size, made, pulse, aside=Aside(device))
            summed_TD = hidden_TD.clone()
            sum_ms = ms_of(lambda summed_TD=summed_TD: switch.now.all_reduce(summed_TD))
            say(f"nccl, blocks {blocks}: a sum of {hidden_TD.nbytes >> 20} MiB {sum_ms:.3f} ms")
            del summed_TD
            measure(f"blocks {blocks}", CHUNKS, reference)
            for spare in (16, 8) if blocks is None else (blocks,):
                set_sm_target(132 - spare)
                measure(f"blocks {blocks}, spare {spare}", (1, 2, 4), reference)
                set_sm_target(0)
        except Exception as error:
            say(f"blocks {blocks}: {str(error)[:300]}")
    if with_copies:
        copies(ranks, model, tokens, say)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 16384
    torch.multiprocessing.spawn(work, (size, tokens, "copies" in sys.argv, 29600 + size), nprocs=size)
