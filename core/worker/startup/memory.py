"""How many KV-cache blocks fit: on a CPU from a stated budget, on a GPU from the memory left after the largest step.

Every refusal shows the arithmetic and the key to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hookline.core.config.settings import MAX_COUNT, EngineConfig
from hookline.core.contracts import AttentionSpec
from hookline.core.errors import CapacityError

GIB = 1 << 30
MIN_BLOCKS = 2
"""A smaller pool cannot serve a request of more than one block."""


def block_bytes(num_layers: int, spec: AttentionSpec) -> int:
    """Bytes of one block over all layers that share it, keys and values, on this rank."""
    numbers = spec.num_cached * num_layers * spec.num_kv_heads * spec.head_dim * spec.block_size
    return numbers * torch.empty(0, dtype=spec.stored_dtype).element_size()


def count_blocks(
    engine: EngineConfig, num_layers: int, spec: AttentionSpec, rehearsals: Sequence[Callable[[], None]]
) -> int:
    """Blocks of the pool: engine.num_blocks if set, else as many as the device's memory allows.

    num_layers: how many layers a block has room for; with none, blocks take no memory, and there are twice as many as
    the longest requests hold, since policies keep a part of them free. rehearsals: each computes a largest step that
    the limits allow, the first one a step of prompts; on a GPU the sum of their peaks is left free, since a captured
    graph keeps its memory while other steps run. With engine.num_blocks only the first rehearsal runs there, for the
    kernels that it compiles.

    Raises: CapacityError if not even a request of two blocks fits.
    """
    if engine.num_blocks is not None:
        if spec.device.type == "cuda":
            rehearsals[0]()
            torch.cuda.empty_cache()
        return engine.num_blocks
    if not num_layers:
        return min(2 * spec.max_num_seqs * -(-spec.max_model_len // spec.block_size), MAX_COUNT)
    size = block_bytes(num_layers, spec)
    if spec.device.type == "cpu":
        budget = int(engine.cpu_cache_gib * GIB)
        found = f"engine.cpu_cache_gib={engine.cpu_cache_gib}"
    else:
        budget, found = _left_on_gpu(engine, spec.device, rehearsals)
    count = budget // size - 1  # one more block is scratch for padding
    if count < MIN_BLOCKS:
        raise CapacityError(
            f"no room for a KV cache: {found} leaves {budget / GIB:.2f} GiB, and {MIN_BLOCKS + 1} blocks of "
            f"{spec.block_size} tokens take {(MIN_BLOCKS + 1) * size / GIB:.2f} GiB; raise it, or lower "
            "engine.block_size, engine.max_num_batched_tokens or engine.max_num_seqs"
        )
    return min(count, MAX_COUNT)


def _left_on_gpu(
    engine: EngineConfig, device: torch.device, rehearsals: Sequence[Callable[[], None]]
) -> tuple[int, str]:
    peak = sum(_peak_bytes(device, rehearsal) for rehearsal in rehearsals)
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * engine.memory_fraction) - (total - free) - peak
    found = (
        f"{total / GIB:.2f} GiB x engine.memory_fraction={engine.memory_fraction}, less {(total - free) / GIB:.2f} GiB "
        f"in use and {peak / GIB:.2f} GiB for the largest steps,"
    )
    return max(budget, 0), found


def _peak_bytes(device: torch.device, rehearsal: Callable[[], None]) -> int:
    """Most bytes that a rehearsal holds at a time, beyond the bytes that are held before it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rehearsal()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def allocate_cache(num_layers: int, num_blocks: int, spec: AttentionSpec) -> Tensor:
    """The KV cache, all zeros: [2, layers, blocks + 1, block_size, K, E], or [1, ...] of keys alone.

    The last block is scratch.
    """
    shape = (spec.num_cached, num_layers, num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)
    if not num_layers:
        return torch.empty(shape, dtype=spec.stored_dtype, device=spec.device)
    if spec.device.type == "cpu":
        return _zeros_on_cpu(shape, spec)
    try:
        return torch.zeros(shape, dtype=spec.stored_dtype, device=spec.device)
    except torch.OutOfMemoryError:
        free = torch.cuda.mem_get_info(spec.device)[0]
        raise CapacityError(
            f"the KV cache of {num_blocks} blocks takes {_num_bytes(shape, spec) / GIB:.2f} GiB and "
            f"{free / GIB:.2f} GiB are free; lower engine.num_blocks or engine.memory_fraction"
        ) from None


def release(tensors: Iterable[Tensor]) -> None:
    """Free the GPU memory of these tensors, even if other views of it exist; none may be computed with afterwards."""
    for tensor in tensors:
        if tensor.is_cuda and tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(0)


def _zeros_on_cpu(shape: tuple[int, ...], spec: AttentionSpec) -> Tensor:
    """Zeros whose pages cost nothing until they are written, so a large budget does not slow the start."""
    try:
        return torch.from_numpy(np.zeros(_num_bytes(shape, spec), np.uint8)).view(spec.stored_dtype).view(shape)
    except (MemoryError, ValueError):  # numpy raises ValueError for more bytes than addresses reach
        raise CapacityError(
            f"the KV cache of {shape[2] - 1} blocks takes {_num_bytes(shape, spec) / GIB:.2f} GiB, more than this "
            "machine gives; lower engine.num_blocks or engine.cpu_cache_gib"
        ) from None


def _num_bytes(shape: tuple[int, ...], spec: AttentionSpec) -> int:
    return math.prod(shape) * torch.empty(0, dtype=spec.stored_dtype).element_size()
