"""The poolers that a FakeExecutor knows, which have names and no work to do. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hookline.core.contracts import PooledChunks, Pooler, PoolerSpec
from hookline.core.plugin.registry import POOLER, Entry, Origin
from hookline.core.requests.pooling import Poolers

if TYPE_CHECKING:
    from torch import Tensor

READS_ALL = 1
"""The index of "all"."""
NUM_NUMBERS = 3
"""Numbers in a fake's vector."""


def pooled_numbers(prompt: Sequence[int]) -> list[float]:
    """The vector that the fake gives a prompt: whole numbers that depend on every token."""
    data = np.asarray(prompt, dtype=np.int64).tobytes()
    return [float(xxhash.xxh64_intdigest(data, seed=place) % 1000) for place in range(NUM_NUMBERS)]


def fake_poolers() -> Poolers:
    """Poolers by whose names a FakeExecutor pools: last, and all, which reads all tokens."""
    origin = Origin("fakes", __name__, "hookline", "0")
    names = {"last": "LastOfFakes", "all": "AllOfFakes"}
    entries = [Entry(POOLER, name, f"{__name__}:{target}", origin) for name, target in names.items()]
    return Poolers(entries, hidden_size=NUM_NUMBERS)


class AllOfFakes(Pooler):
    """A pooler class whose attributes the host reads; it is never constructed."""

    def __init__(self, config: Any, spec: PoolerSpec) -> None:
        raise AssertionError("a FakeExecutor makes no pooler")

    def state_size(self) -> int:
        """Never called."""
        return 0

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        """Never called."""
        return state_BS

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        """Never called."""
        return state_BS


class LastOfFakes(AllOfFakes):
    """The same for a pooler that reads the last token alone."""

    reads_all_tokens = False
