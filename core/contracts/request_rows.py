"""What the device keeps of running requests, and the operations by which a captured decode step begins and ends.

Legend: R rows of requests, N rows of a step, M blocks in a table row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RequestRows:
    """What the device keeps of each running request, one row each; one more row, padding_row, stands for none.

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


class DecodeInputs(NamedTuple):
    """What a step needs of rows that each compute the token that was drawn last, and draw the next one.

    Shapes: context_lens_N int32, with that token; block_table_NM int32; temperature_N float32; the others int64:
    token_ids_N, position_N in the request, slot_mapping_N in the cache, seed_N, and draw_position_N of the token to be
    drawn.
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
        """What decodes of these rows need. A row may be there more than once, as the padding row is.

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
    def keep_tokens(self, rows_N: Tensor, tokens_N: Tensor, draw_position_N: Tensor, requests: RequestRows) -> None:
        """Write drawn tokens into the rows: last_token_R, and length_R, which is one more than the draw's position.

        Token 0 in place of NO_TOKEN and all below it: a step may be launched for its request before the host ends it.
        The padding row, which may be there more than once, has length 1 afterwards, and any token.
        Shapes: rows_N, draw_position_N (N,) int64; tokens_N (N,) int64, not necessarily adjacent in memory.
        Device: no host sync; graph-safe.
        """
        requests.last_token_R[rows_N] = tokens_N.clamp(min=0)
        requests.length_R[rows_N] = (draw_position_N + 1).to(requests.length_R.dtype)
        requests.length_R[requests.padding_row : requests.padding_row + 1].fill_(1)
