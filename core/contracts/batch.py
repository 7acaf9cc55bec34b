"""The batch of one step as kernels see it: flat tokens, cache slots and block tables; and the device's table of running
requests, with the operations by which a captured decode step reads and writes it.

Kernels get these tensors alone, no requests and no plans. Legend: T tokens of the step, B requests of the step, N rows
of a step, M blocks in a table row, R rows of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass
class Batch:
    """The device tensors of one step, and the few sizes the host knows without asking the device.

    Rows are ordered decodes first (one token each), then prefill chunks; tokens lie in row order.
    Shapes: token_ids_T, positions_T, slot_mapping_T int64; query_starts_B1 (B + 1,) int32, the first token of each row;
    context_lens_B int32, tokens in the cache once this step has written (padding rows: 1);
    block_table_BM int32; entries past a row's context, and entries of blocks that lie wholly before the window of its
    first query, may name any block.

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
    """Tokens that a query sees, itself included; None for all before it. Layers with another window have another batch,
    prepared separately, which differs from this one in window, slot_mapping_T, block_table_BM and scratch."""
    repeats_requests: bool = False
    """Whether rows may be consecutive tokens of one request, with the same blocks. Then all keys are written before any
    row attends: `qk_norm_rope_write` and `attend` are called, and not `qkv_attend`."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Space for Kernels.prepare to store values for `attend`."""

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


@dataclass(frozen=True)
class RequestRows:
    """The device's table of running requests, one row each; one more row, padding_row, belongs to no request.

    Shapes: last_token_R int64, the token drawn last; length_R int32, tokens known, of which the last one is not in the
    cache yet; temperature_R float32; seed_R int64; block_table_RM int32, whose rows need not be adjacent in memory.
    block_size: tokens of a block.
    """

    last_token_R: Tensor
    length_R: Tensor
    temperature_R: Tensor
    seed_R: Tensor
    block_table_RM: Tensor
    block_size: int
    padding_row: int


@dataclass(frozen=True)
class DraftingRows:
    """The tokens and limits of requests for which the device makes drafts itself, beside their RequestRows.

    Shapes: tokens_RL int32, the tokens of each row, as many as its length says; limit_R int64, the most tokens that its
    request gets; due_R float32, how many pretended drafts are still to be kept, a part of one.
    vocab_size: of the model. pretended_length: of the drafter; None keeps drafts that are right.
    """

    tokens_RL: Tensor
    limit_R: Tensor
    due_R: Tensor
    vocab_size: int
    pretended_length: float | None = None


class DecodeInputs(NamedTuple):
    """The inputs of a step's N decode rows: each computes the newest token of its request and samples the next one.

    Shapes: context_lens_N int32, with that token; block_table_NM int32; temperature_N float32; the others int64:
    token_ids_N, position_N in the request, slot_mapping_N in the cache, seed_N, and draw_position_N of the token to be
    sampled.
    """

    token_ids_N: Tensor
    position_N: Tensor
    context_lens_N: Tensor
    block_table_NM: Tensor
    slot_mapping_N: Tensor
    temperature_N: Tensor
    seed_N: Tensor
    draw_position_N: Tensor


class RequestRowOperations(Protocol):
    """Operations on the rows of requests, which kernels may do in fewer launches; for `Kernels`."""

    @optional
    def gather_decodes(self, rows_N: Tensor, requests: RequestRows) -> DecodeInputs:
        """Gather the inputs of decode rows. A row of the table may be named more than once, as the padding row is.

        Shapes: rows_N (N,) int64. All results are contiguous.
        Device: no host sync; graph-safe. Writes to none of its inputs.
        """
        context_N = requests.length_R.index_select(0, rows_N)
        draw_position_N = context_N.long()
        position_N = draw_position_N - 1
        table_NM = requests.block_table_RM.index_select(0, rows_N)
        column_N = position_N // requests.block_size
        block_N = table_NM.gather(1, column_N.unsqueeze(1)).squeeze(1)
        return DecodeInputs(
            requests.last_token_R.index_select(0, rows_N),
            position_N,
            context_N,
            table_NM,
            position_N + (block_N - column_N) * requests.block_size,
            requests.temperature_R.index_select(0, rows_N),
            requests.seed_R.index_select(0, rows_N),
            draw_position_N,
        )

    @optional
    def gather_tokens(self, inputs_3N: Tensor, requests: RequestRows) -> DecodeInputs:
        """`gather_decodes` for tokens at any positions: each is computed as if it were the newest one of its request.

        Shapes: inputs_3N (3, N) int64, contiguous: for each token its id, or -1 for the token that its row drew last,
        its position, and its row. All results are contiguous.
        Device: no host sync; graph-safe. Writes to none of its inputs.
        """
        token_ids_N, position_N, rows_N = inputs_3N
        table_NM = requests.block_table_RM.index_select(0, rows_N)
        column_N = position_N // requests.block_size
        block_N = table_NM.gather(1, column_N.unsqueeze(1)).squeeze(1)
        last_N = requests.last_token_R.index_select(0, rows_N)
        draw_position_N = position_N + 1
        return DecodeInputs(
            last_N.where(token_ids_N < 0, token_ids_N),
            position_N.clone(),
            draw_position_N.int(),
            table_NM,
            position_N + (block_N - column_N) * requests.block_size,
            requests.temperature_R.index_select(0, rows_N),
            requests.seed_R.index_select(0, rows_N),
            draw_position_N,
        )

    @optional
    def keep_tokens(self, rows_N: Tensor, tokens_N: Tensor, draw_position_N: Tensor, requests: RequestRows) -> None:
        """Write drawn tokens into the rows: last_token_R, and length_R, which is one more than the draw's position.

        Token 0 in place of NO_TOKEN and all below it: a step may be launched for its request before the host ends it.
        The padding row, which may be named more than once, has length 1 afterwards, and any token.
        Shapes: rows_N, draw_position_N (N,) int64; tokens_N (N,) int64, not necessarily adjacent in memory.
        Device: no host sync; graph-safe.
        """
        requests.last_token_R[rows_N] = tokens_N.clamp(min=0)
        requests.length_R[rows_N] = (draw_position_N + 1).to(requests.length_R.dtype)
        requests.length_R[requests.padding_row : requests.padding_row + 1].fill_(1)

    @optional
    def lay_out_drafts(
        self, rows_B: Tensor, drafts_BK: Tensor, drafting: DraftingRows, requests: RequestRows, inputs_3G: Tensor
    ) -> None:
        """Write the inputs of a step that computes each row's newest token and the K drafts behind it.

        A row's drafts end before the first one that is no token of the vocabulary, and before the last token that its
        request gets, which is drawn; a row with all its tokens has none here. In place of what a row has not, and
        behind all rows, stand token 0 and position 0 of the padding row.
        Shapes: rows_B (B,), drafts_BK (B, K) int64; inputs_3G (3, G) int64, contiguous: for each token its id, its
        position and its row, 1 + K tokens for each of rows_B. A row may be named more than once.
        Device: no host sync; graph-safe. Writes to inputs_3G alone.
        """
        lengths_B = requests.length_R.index_select(0, rows_B)
        is_token_BK = (drafts_BK >= 0) & (drafts_BK < drafting.vocab_size)
        counts_B = 1 + is_token_BK.cumprod(1).sum(1)
        counts_B = counts_B.minimum(drafting.limit_R.index_select(0, rows_B) - lengths_B)
        places_P = rows_B.new_ones(1 + drafts_BK.shape[1]).cumsum(0) - 1
        is_used_BP = places_P < counts_B.unsqueeze(1)
        inputs_3G.zero_()
        inputs_3G[2].fill_(requests.padding_row)
        inputs_3BP = inputs_3G[:, : is_used_BP.numel()].view(3, *is_used_BP.shape)
        inputs_3BP[0, :, 0] = requests.last_token_R.index_select(0, rows_B)
        inputs_3BP[0, :, 1:] = drafts_BK
        inputs_3BP[0] *= is_used_BP
        inputs_3BP[1] = (lengths_B.unsqueeze(1) - 1 + places_P) * is_used_BP
        inputs_3BP[2] = rows_B.unsqueeze(1).where(is_used_BP, requests.padding_row)

    @optional
    def keep_drafts(
        self,
        rows_B: Tensor,
        inputs_3G: Tensor,
        drawn_G: Tensor,
        num_drafts: int,
        drafting: DraftingRows,
        requests: RequestRows,
    ) -> Tensor:
        """Keep the draws behind right drafts: in last_token_R, length_R and tokens_RL, as `keep_tokens` keeps tokens.

        Shapes: rows_B, inputs_3G as of `lay_out_drafts`; drawn_G (G,) int64, the draw behind each token. Returns
        (B * (3 + K),) int64, for each row how many drafts it had, how many of these are kept, and its 1 + K draws.
        Device: no host sync; graph-safe. What tokens_RL holds behind a row's length does not matter, nor what is
        returned for the padding row.
        """
        size_BP = len(rows_B), 1 + num_drafts
        count = size_BP[0] * size_BP[1]
        tokens_BP, positions_BP, owners_BP = inputs_3G[:, :count].view(3, *size_BP)
        drawn_BP = drawn_G[:count].view(size_BP)
        is_used_BP = owners_BP == rows_B.unsqueeze(1)
        num_drafts_B = (is_used_BP.sum(1) - 1).clamp(min=0)
        if drafting.pretended_length is None:
            is_right_BK = is_used_BP[:, 1:] & (tokens_BP[:, 1:] == drawn_BP[:, :-1])
            kept_B = is_right_BK.cumprod(1).sum(1)
        else:
            due_B = drafting.due_R.index_select(0, rows_B) + (drafting.pretended_length - 1)
            whole_B = (due_B + 1e-4).floor()
            drafting.due_R[rows_B] = due_B - whole_B
            kept_B = whole_B.long().minimum(num_drafts_B)
        owners_B, lengths_B, known_BP = owners_BP[:, 0], positions_BP[:, 0] + 1, drawn_BP.clamp(min=0)
        requests.length_R[owners_B] = (lengths_B + 1 + kept_B).to(requests.length_R.dtype)
        requests.last_token_R[owners_B] = known_BP.gather(1, kept_B.unsqueeze(1)).squeeze(1)
        requests.length_R[requests.padding_row : requests.padding_row + 1].fill_(1)
        places_BP = lengths_B.unsqueeze(1) + rows_B.new_ones(size_BP[1]).cumsum(0) - 1
        places_BP = places_BP.clamp(max=drafting.tokens_RL.shape[1] - 1)
        drafting.tokens_RL[owners_B.unsqueeze(1), places_BP] = known_BP.int()
        results_BX = rows_B.new_empty((size_BP[0], 2 + size_BP[1]))
        results_BX[:, 0], results_BX[:, 1], results_BX[:, 2:] = num_drafts_B, kept_B, drawn_BP
        return results_BX.view(-1)
