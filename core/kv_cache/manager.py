"""Who holds which KV-cache block: finds, shares, allocates, caches and releases the blocks of requests."""

from __future__ import annotations

from hookline.core.kv_cache.block_pool import ROOT, BlockPool
from hookline.core.requests.request import Request


def match_prefix(pool: BlockPool, request: Request) -> list[int]:
    """Findable blocks that hold the request's leading tokens; never all of them, its last token is always computed."""
    if request.match[0] != pool.version:
        request.match = (pool.version, _walk(pool, request) if pool.caching else [])
    return request.match[1]


def _walk(pool: BlockPool, request: Request) -> list[int]:
    blocks: list[int] = []
    parent = ROOT
    for index in range(max_cached_blocks(request)):
        block = pool.find(request.block_hash(index), request.block_tokens(index), parent)
        if block is None:
            break
        blocks.append(block)
        parent = pool.serial(block)
    return blocks


def max_cached_blocks(request: Request) -> int:
    """Full blocks before the request's last known token; none while its prompt is to be scored and so computed."""
    if request.scores is not None and request.scores.misses_prompt:
        return 0
    return (request.num_tokens - 1) // request.block_size
