"""How the kernels of a step follow one another: programmatic dependent launch, and when it pays.

A kernel with it starts while the one before it still runs, does what does not depend on that one, and waits
(`gdc_wait`) before it reads or writes anything else. Two rules keep that correct. A kernel may run ahead of its wait
only with what no kernel launched this way writes: weights, and whatever ordinary launches prepared for the step, if
another ordinary launch lies in between, as the embedding does, or the copy of the stream on a later stage; what the
launch right before it wrote may not be there yet. And one that lets the next start early must wait itself, so that
whatever waits for it waits for all before it.

A third holds where a kernel reads ahead of its wait what such a kernel wrote, as sums of what a product sends do: the
product lets the next start only after its own wait, so that all before the product is done, and the sum asks past the
L1 cache.
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


def cdiv(amount: int, size: int) -> int:
    """How many parts of this size an amount takes: triton.cdiv, which takes the host over 1 us a call."""
    return -(-amount // size)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not less: triton.next_power_of_2, likewise."""
    return 1 << max(0, number - 1).bit_length()


WIDE_GROUP = 8
"""From this many query heads per kv head on, attention behaves as measured at Qwen3-32B's shapes."""


def fuses_decode(num_rows: int, group: int = 1) -> bool:
    """Whether rotation and cache write of this many decode rows are faster inside the attention kernel.

    They then delay every program of it, but save a launch; and where programs of the next kernel find their place among
    those still running decides more than either. As measured on an H200 (docs/log).
    """
    return num_rows <= 32 or (group >= WIDE_GROUP and num_rows <= 256)


LARGE_WIDTH = 4096
"""From this hidden size on, triton_wide.py computes products; its programs take whole multiprocessors."""


def triggers_late(num_rows: int, *, is_large: bool = False) -> bool:
    """Whether norms and attention of this many rows let the next kernel start only once their own wait is over.

    is_large: the model's hidden size is at least LARGE_WIDTH, or its attention has wide groups.
    """
    return num_rows > 4 and (is_large or num_rows <= 24 or 64 < num_rows <= 256)
