"""One step's worth of work as the kernels see it: flat tokens, cache slots, block tables.

Kernels get no requests and no plans, only this. Legend: T tokens of the step, B requests of the step, M blocks in a
table row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass
class Batch:
    """The device tensors of one step, and the few sizes the host knows without asking the device.

    Rows are ordered decodes first (one token each), then prefill chunks; tokens lie in row order.
    Shapes: token_ids_T, positions_T, slot_mapping_T int64; query_starts_B1 (B + 1,) int32, the first token of each row;
    context_lens_B int32, tokens in the cache once this step has written (padding rows: 1);
    block_table_BM int32; entries past a row's context, and those of blocks wholly before what its first query sees, may
    name any block.

    A batch inside a captured graph has no lengths on the host: context_lens_host is None, and every size here is the
    graph's. Captured decodes are rows of one token. In a captured step with prompts (only for kernels that declare
    `graph_prefill`) query_starts_host is None, rows that the step does not need have no queries, and the tokens that it
    does not need are queries of the last row, in the scratch block; max_query_len is T without its decodes.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    query_starts_B1: Tensor
    context_lens_B: Tensor
    block_table_BM: Tensor
    num_decodes: int
    """How many rows decode. They come first and have one query token each."""
    max_query_len: int
    max_context_len: int
    """An upper bound; block_table_BM covers it."""
    query_starts_host: np.ndarray[Any, np.dtype[np.int32]] | None
    """query_starts_B1 on the host; for an all-decode batch simply 0..B, None in a captured step with prompts."""
    context_lens_host: np.ndarray[Any, np.dtype[np.int32]] | None = None
    """context_lens_B on the host; None inside a captured graph."""
    shared_lens_B: Tensor | None = None
    """(B,) int32: the same number of leading tokens for all rows that share them, 0 for the others. Only in batches of
    decodes, and only for kernels that declare `shared_prefix`."""
    window: int | None = None
    """Tokens that a query sees, itself included; None for all before it. Layers of other windows have batches of their
    own, each prepared by itself, which differ from this one in window, slot_mapping_T, block_table_BM and scratch."""
    repeats_requests: bool = False
    """Whether rows may be consecutive tokens of one request, with the same blocks. Then all keys are written before any
    row attends: `qk_norm_rope_write` and `attend` are called, and not `qkv_attend`."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Whatever Kernels.prepare leaves there for `attend`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step: T."""
        return self.token_ids_T.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests of the step: B."""
        return self.block_table_BM.shape[0]


def wanted_rows(attend: Any) -> Tensor | None:
    """The tokens (N,) whose hidden states are wanted of a model's forward; None if all are.

    See Attend. A wrapper around core's `attend` that has no `rows_N` wants all.
    """
    rows_N: Tensor | None = getattr(attend, "rows_N", None)
    return rows_N
