"""Which steps are captured as CUDA graphs, and how far they are padded. No torch, no graphs."""

from __future__ import annotations

TOKEN_COUNTS = (32, 64, 128, 192, 256, 384, 512)
"""Tokens of captured prefill steps; larger ones keep the card busy for longer than the host takes to launch them."""
MAX_ROWS = 16
"""Most requests of a captured prefill step."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Row counts to capture: every batch up to max_num_seqs fits one, with at most a quarter of padding from 32 on."""
    sizes = {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, max_num_seqs}
    step, size = 16, 80
    while size <= max_num_seqs:
        sizes.add(size)
        step = max(16, size // 8 // 16 * 16)
        size += step
    return sorted(size for size in sizes if size <= max_num_seqs)
