"""Which part of heads, rows or columns belongs to a rank."""

from __future__ import annotations

from hookline.core.contracts import Part, Ranks
from hookline.core.errors import ConfigError

_MOST_RANKS_LISTED = 64


def even_part(total: int, ranks: Ranks, what: str) -> Part:
    """The equal share of `total` that is this rank's; `what` names it in the error, e.g. "intermediate_size".

    Raises: ConfigError listing the tp values that divide it.
    """
    if total % ranks.size:
        valid = [size for size in range(1, min(total, _MOST_RANKS_LISTED) + 1) if total % size == 0]
        raise ConfigError(f"tp={ranks.size} does not divide {what} {total}. Valid tp values: {_listed(valid)}")
    size = total // ranks.size
    return Part(total, ranks.rank * size, (ranks.rank + 1) * size)


def head_parts(num_heads: int, num_kv_heads: int, ranks: Ranks) -> tuple[Part, Part]:
    """The rank's query heads and kv heads; kv heads are replicated when there are more ranks than kv heads.

    Raises: ConfigError listing the tp values that split the heads.
    """
    valid = [size for size in range(1, num_heads + 1) if _splits_heads(num_heads, num_kv_heads, size)]
    if ranks.size not in valid:
        raise ConfigError(
            f"tp={ranks.size} cannot split {num_heads} attention heads and {num_kv_heads} kv heads. "
            f"Valid tp values: {_listed(valid)}"
        )
    heads = even_part(num_heads, ranks, "attention heads")
    if num_kv_heads % ranks.size == 0:
        return heads, even_part(num_kv_heads, ranks, "kv heads")
    first_kv_head = ranks.rank * num_kv_heads // ranks.size
    return heads, Part(num_kv_heads, first_kv_head, first_kv_head + 1)


def _splits_heads(num_heads: int, num_kv_heads: int, size: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
