"""A peer for tools/bench_beside.py: answers at once, and notes nothing."""

from __future__ import annotations

import asyncio
from typing import Any


class Peer:
    def __init__(self, shape: dict[str, Any], sizes: dict[str, int]) -> None:
        assert shape["model_type"] == "qwen3" and sizes["max_num_seqs"] == 8

    async def stream(self, prompt: list[int], num_tokens: int, seen: Any) -> None:
        for _ in range(num_tokens):
            seen(1)
            await asyncio.sleep(0)

    def close(self) -> None:
        pass


class Breaks(Peer):
    def __init__(self, shape: dict[str, Any], sizes: dict[str, int]) -> None:
        raise RuntimeError("no such card")
