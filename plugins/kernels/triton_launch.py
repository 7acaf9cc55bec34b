"""Programmatic dependent launch of a step's kernels, and when it pays.

A kernel launched this way starts while the kernel before it still runs, does the work that does not depend on that
kernel, and waits (`gdc_wait`) before it reads or writes anything else. Two rules keep that correct:
- Before its wait, a kernel may read only memory that no kernel launched this way writes: weights, and data that
  ordinary launches prepared for the step, if another ordinary launch lies in between, such as the embedding, or the
  copy of the stream on a later stage. States of requests are such data: the step before wrote them, and in this one
  their layer alone does. Results of the launch right before it may not be complete yet.
- A kernel that lets the next one start early must wait itself, so that waiting for it means waiting for all before it.

A third rule is for sums, which read data sent by such a product before their wait: the product lets the next kernel
start only after its own wait, so that all kernels before the product are done, and the sum reads past the L1 cache.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def launches_early(device: torch.device) -> bool:
    """Whether the card has programmatic dependent launch: from compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch whose kernel waits by `gdc_wait` for the kernel before it."""
    return {"PDL": True, "launch_pdl": True} if launches_early(device) else {"PDL": False}


OF_STEP = (
    "rows_ptr", "starts_ptr", "query_starts_ptr", "context_lens_ptr", "shared_lens_ptr", "positions_ptr", "slots_ptr",
)  # fmt: skip
"""Arguments of kernels that lie anywhere in the memory of a step, so their alignment must not choose a variant."""


def cdiv(amount: int, size: int) -> int:
    """How many parts of this size an amount takes, without triton.cdiv, which takes the host over 1 us a call."""
    return -(-amount // size)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not less than number, without triton.next_power_of_2, which is slow, too."""
    return 1 << max(0, number - 1).bit_length()


WIDE_GROUP = 8
"""From this many query heads per kv head on, attention behaves as measured at Qwen3-32B's shapes."""


def fuses_decode(num_rows: int, group: int = 1) -> bool:
    """Whether rotation and cache write of this many decode rows are faster inside the attention kernel.

    Fusing delays every program of that kernel, but saves a launch; on which multiprocessors the next kernel's programs
    start matters more than both. As measured on an H200 (docs/log).
    """
    return num_rows <= 32 or (group >= WIDE_GROUP and num_rows <= 256)


LARGE_WIDTH = 4096
"""From this hidden size on, triton_wide.py computes products; its programs take whole multiprocessors."""


def triggers_late(num_rows: int, *, is_large: bool = False) -> bool:
    """Whether norms and attention of this many rows let the next kernel start only once their own wait is over.

    is_large: the model's hidden size is at least LARGE_WIDTH, or its attention has wide groups.
    """
    return num_rows > 4 and (is_large or num_rows <= 24 or 64 < num_rows <= 256)
