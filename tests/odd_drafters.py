"""Drafters that are wrong in every way, registered as a plugin: none of them may change a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.core.contracts import Drafter, DrafterSpec, DraftRow, Registrar, hookimpl

API_VERSION = 2


@dataclass
class OddConfig:
    """See LookupConfig of plugins/drafters."""

    k: int = 5
    adaptive: bool = False


class _Odd(Drafter):
    def __init__(self, config: Any, spec: DrafterSpec) -> None:
        self.k, self.adaptive, self.vocab_size = config.k, config.adaptive, spec.vocab_size


class Random(_Odd):
    """Random tokens, often none that come next."""

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter."""
        found: list[int] = np.random.default_rng(len(row.tokens)).integers(0, self.vocab_size, row.num_drafts).tolist()
        return found


class Raising(_Odd):
    """Raises every other time."""

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter."""
        if len(row.tokens) % 2:
            raise RuntimeError("no idea")
        return [int(row.tokens[-1])] * row.num_drafts

    def forget(self, id: int) -> None:
        """See Drafter."""
        raise RuntimeError("never knew it")


class Nonsense(_Odd):
    """Proposes what is no draft."""

    def propose(self, row: DraftRow) -> Any:
        """See Drafter."""
        kinds: list[Any] = [
            [self.vocab_size], [-1], [0] * (row.num_drafts + 1), ["a"], 3, None, [1.5], [[1]], [2**70], row.tokens,
        ]  # fmt: skip
        return kinds[len(row.tokens) % len(kinds)]


class Writing(_Odd):
    """Writes to the request's tokens."""

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter."""
        row.tokens[:] = 0
        return []


class Short(Random):
    """Proposes for all requests of a step, but of three or more it leaves one out."""

    def propose_all(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """See Drafter."""
        return [self.propose(row) for row in (rows[1:] if len(rows) > 2 else rows)]


@hookimpl
def register_drafters(register: Registrar) -> None:
    """All of them."""
    for cls in (Random, Raising, Nonsense, Writing, Short):
        register(cls.__name__.lower(), f"tests.odd_drafters:{cls.__name__}", config=OddConfig)
