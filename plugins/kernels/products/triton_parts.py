"""A product whose input features are cut into parts, with a program for each: the last one to finish adds them up.

So a weight with few outputs is read by the whole card. Parts are added up in their order, whichever program is last.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class PartsScratch:
    """Where programs leave their parts; made once, so that graphs see fixed addresses. One product at a time uses it.

    Shapes: partials, flat, float32; counters, one a tile, int32, zero between launches.
    """

    partials: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, device: torch.device, num_partials: int, num_tiles: int) -> Self:
        """Allocate room for num_partials numbers in all, and for the counters of num_tiles tiles."""
        return cls(
            torch.empty(num_partials, dtype=torch.float32, device=device),
            torch.zeros(num_tiles, dtype=torch.int32, device=device),
        )


@triton.jit
def leave_part(acc, at, counter_ptr, PARTS: tl.constexpr):
    """Store this program's part of a tile at `at`; returns whether it is the last, so that all parts are stored.

    Load the parts past the L1 cache: other programs wrote them while this program ran.
    """
    tl.store(at, acc)
    tl.debug_barrier()  # every thread's part is written before one thread publishes it
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        tl.store(counter_ptr, 0)  # for the next launch
    return is_last
