"""Which decoding requests begin with the same blocks, so that kernels can read those once for all of them.

Only the lists of blocks are compared: requests have the same block only if they have the same tokens in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hookline.core.requests.request import Request

MIN_SAVED_TOKENS = 16384
"""Fewest cached tokens, over all requests, that a step must be spared from reading for the extra kernel to pay off."""


def shared_prefix(requests: Sequence[Request]) -> tuple[list[Request], int]:
    """The largest group of requests with a common first block, and the tokens it shares; ([], 0) if not worth it.

    Only blocks that lie wholly before each request's last token count.
    """
    if len(requests) < 2:
        return [], 0
    first, count = Counter(request.blocks[0] for request in requests).most_common(1)[0]
    if count < 2:
        return [], 0
    group = [request for request in requests if request.blocks[0] == first]
    length = common_blocks([request.blocks for request in group])
    length = min(length, min((request.num_tokens - 1) // request.block_size for request in group))
    num_tokens = length * group[0].block_size
    return (group, num_tokens) if num_tokens * (count - 1) >= MIN_SAVED_TOKENS else ([], 0)


def common_blocks(tables: Sequence[list[int]]) -> int:
    """Length of the longest common prefix of these lists of blocks.

    Only the smallest and the largest list in lexical order are compared: what these two share, all share.
    """
    low, high = min(tables), max(tables)
    pairs = zip(low, high, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(low), len(high)))
