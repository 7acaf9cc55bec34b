"""A watermark in the logits: its arguments, its registration and its detector. Imports no torch.

Source: Kirchenbauer et al. 2023, A Watermark for Large Language Models, arXiv:2301.10226.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hookline.core.contracts import Needs, Registrar, bounded, hookimpl

API_VERSION = 2
MULTIPLIER, SHIFT, BITS = 0x9E3779B1, 15, 0xFFFFFFFF


@dataclass
class WatermarkArguments:
    """Of a request, as extra_args={"watermark": {...}}, or of an engine, as processors.watermark.delta=2."""

    delta: float = bounded(0.0, 0)
    """What is added to the logits of green tokens; 0 changes nothing."""
    gamma: float = bounded(0.5, 0, 1)
    """Which part of the vocabulary is green."""
    key: int = bounded(15485863, 1, BITS)
    """The secret: whoever has it can detect the watermark."""


@dataclass(frozen=True)
class Detection:
    """num_green of num_scored tokens are green; z: standard deviations above what chance gives."""

    num_green: int
    num_scored: int
    z: float


def mixed(number: int) -> int:
    """32 bits that look random."""
    for _ in range(3):
        number = (number * MULTIPLIER) & BITS
        number ^= number >> SHIFT
    return number


def is_green(token_id: int, previous: int, gamma: float, key: int) -> bool:
    """Whether a token is green behind another."""
    return mixed(mixed(previous ^ key) ^ token_id) < gamma * (BITS + 1)


def detect(token_ids: Sequence[int], gamma: float = 0.5, key: int = 15485863) -> Detection:
    """Look for the watermark in the tokens of a text, each pair of neighbours counted once.

    Raises: ValueError if there is no such pair.
    """
    pairs = set(pairwise(token_ids))
    if not pairs:
        raise ValueError("a watermark cannot be found in less than two tokens")
    green = sum(is_green(token_id, previous, gamma, key) for previous, token_id in pairs)
    spread = math.sqrt(len(pairs) * gamma * (1 - gamma)) or 1.0
    return Detection(green, len(pairs), (green - gamma * len(pairs)) / spread)


@hookimpl
def register_processors(register: Registrar) -> None:
    register(
        "watermark",
        "hookline_watermark.processor:Watermark",
        config=WatermarkArguments,
        help="delta, gamma, key: prefer the green tokens behind each token",
        needs=Needs(graph_safe=True, sizes_alike=True),
        priority=-100,  # behind everything that forbids tokens
    )
