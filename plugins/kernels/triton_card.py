"""The card for which tiles are chosen, and the tiles that fit its shared memory.

The loop of a tiled kernel is a software pipeline, whose stages hold operands in the shared memory of its program. A
choice of tiles names the fastest tile on a card with enough memory, and `first_fitting` adapts it to the card: fewer
stages, else the next smaller tile. Neither depends on the rows of a step, so a batch changes no choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

from hookline.core.errors import ConfigError

LEAST_SHARED_BYTES = 99 << 10
"""Least shared memory of a program on cards from compute capability 8.0; assumed if the card's is unknown."""
LARGE_SHARED_BYTES = 200_000
"""Shared memory of a program, about Hopper's; tiles for smaller cards are checked for their results only."""
SPARE_BYTES = 2 << 10
"""Shared memory for barriers, and for the exchange between threads in sums."""
HOLDS_OPERANDS = (9, 10, 11)
"""Compute capabilities (their first number) whose matrix instructions read both operands from shared memory while the
next step is loaded, so that all stages lie there. On other cards, one of the stages lies in registers."""


class Staged(Protocol):
    """A tiling, which says how many steps its loop has under way."""

    @property
    def num_stages(self) -> int:
        """Stages of the loop, that of the matrix product among them."""


Tiling = TypeVar("Tiling", bound=Staged)


@dataclass(frozen=True)
class Room:
    """Bytes of shared memory that a tiling needs: for each pipeline stage, and for the whole loop."""

    step: int
    loop: int = 0


@dataclass(frozen=True)
class Card:
    """The properties of a card by which tilings are chosen.

    shared_memory_bytes: of one program. major: the first number of the compute capability.
    """

    num_sms: int
    shared_memory_bytes: int
    major: int = 9

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card behind a device. Off the GPU (the interpreter): a small card."""
        return _card_of(device)

    @property
    def is_hopper(self) -> bool:
        """Whether its matrix instructions are Hopper's: of no others it was seen that few columns get the bits of
        many.
        """
        return self.major == 9

    @property
    def large_shared_memory(self) -> bool:
        """Whether there is room for the tiles that were measured on Hopper."""
        return self.shared_memory_bytes >= LARGE_SHARED_BYTES

    def most_stages(self, room: Room) -> int:
        """How many stages of such a loop fit; 0 if not even one step does."""
        num_steps = (self.shared_memory_bytes - SPARE_BYTES - room.loop) // room.step
        return max(0, num_steps if self.major in HOLDS_OPERANDS or num_steps < 1 else num_steps + 1)


@cache
def _card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(4, LEAST_SHARED_BYTES)
    properties: Any = torch.cuda.get_device_properties(device)
    bytes_a_program = getattr(properties, "shared_memory_per_block_optin", 0) or LEAST_SHARED_BYTES
    return Card(properties.multi_processor_count, bytes_a_program, properties.major)


def first_fitting(tilings: Iterable[Tiling], room: Callable[[Tiling], Room], card: Card) -> Tiling | None:
    """The first of these tilings of which a step fits, with as many of its stages as do; None if there is none."""
    for tiling in tilings:
        num_stages = min(tiling.num_stages, card.most_stages(room(tiling)))
        if num_stages:
            return tiling if num_stages == tiling.num_stages else replace(tiling, num_stages=num_stages)  # type: ignore[type-var]
    return None


def fitting(tilings: Iterable[Tiling], room: Callable[[Tiling], Room], card: Card, name: str) -> Tiling:
    """`first_fitting`, with an error if none fits. name: of the kernel, for the error.

    Raises: ConfigError if none fits.
    """
    tried = list(tilings)
    found = first_fitting(tried, room, card)
    if found is None:
        raise refused(name, min(map(room, tried), key=lambda asked: asked.step + asked.loop), card)
    return found


def refused(name: str, least: Room, card: Card) -> ConfigError:
    """The error for a card that has no room for the smallest tile of the kernel with this name."""
    return ConfigError(
        f"kernels=triton: {name} needs {least.step + least.loop + SPARE_BYTES:,} bytes of shared memory for a program, "
        f"and this card has {card.shared_memory_bytes:,}; choose kernels=torch"
    )
