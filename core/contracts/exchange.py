"""Collectives of a few rows between GPUs that read each other's memory, and the memory they go through.

Legend: R ranks, S slots, T tokens, N rows, D hidden, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    from torch import Tensor

HEADER_BYTES = 128
"""Bytes of the header of each rank's block; zero until `PeerMemory.let_go` is called for that rank."""
WORD_BYTES = 4
"""Bytes of the flag that `let_go` sets, at the start of the header."""
NUM_COPIES = 2
"""Copies of each slot, taken in turn: an exchange fills one while slower ranks are still in the exchange before."""
MIN_SLOT_BYTES = 2048
"""Smallest slot_bytes that core gives, however few bytes a step exchanges."""
EMPTY = 0xFF
"""Initial value of each byte of data."""


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view of the shared memory. A slot holds the data that one Triton program exchanges at a time.

    rank: this rank's number, from 0. size: R. num_slots: S, the most programs that an exchange may launch.
    slot_bytes: most bytes of a slot that come from one rank, a multiple of 16.
    addresses_R: (R,) int64, the address of each rank's block: a header, whose first 4 bytes `let_go` makes nonzero,
    then data, (slots, copies, R + 1, slot_bytes), of which all bytes are 0xFF at first.
    counts_S: (slots,) int64, how often this rank has used each slot so far.
    """

    rank: int
    size: int
    num_slots: int
    slot_bytes: int
    addresses_R: Tensor
    counts_S: Tensor
    let_go: Callable[[], None] = field(default=lambda: None)
    """Makes this rank's kernels stop waiting for other ranks, from another stream; their results are then invalid."""
    close: Callable[[], None] = field(default=lambda: None)
    """Unmaps the peers' memory when the rank ends; no kernel may use the addresses afterwards."""


class Exchange(Protocol):
    """Collectives of a few rows between GPUs that read each other's memory, by the kernels of a rank.

    For classes to extend; a Kernels class offers them by its method `exchange`. Core calls each on all ranks, in the
    same order. Device: no host sync, graph-safe. All ranks must get the same bits.
    """

    def fits(self, x_TD: Tensor) -> bool:
        """Whether this exchange sums tensors of this shape and dtype; others go through torch.distributed."""
        ...

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        """Sum over ranks, in place; returns x."""
        ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the sum over ranks. May overwrite both inputs."""
        ...

    def best_tokens(self, scores_N: Tensor, tokens_N: Tensor) -> Tensor:
        """For each row, the token (int64) of the rank with the highest score (float32); in a tie, of the lowest rank.

        NaN is higher than every number and gives NO_TOKEN. N is at most the rows that the exchange was made for.
        """
        ...

    # ------------------------------------------------------------------------------------ what a class may leave out

    @optional
    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Kernels.add_rms_norm of the sum over ranks of `linear`; None, with nothing done, where it is not faster.

        Shapes: x_TD (T, D); both results (T, O). May overwrite the residual. All ranks must agree whether to return
        None; only rank 0 gets the bias, so the decision must not depend on it.
        """
        return None

    @optional
    def keeps_own_rows(self, residual_TD: Tensor) -> bool:
        """Whether `add_rms_norm_own` is faster; the same for all sums of one forward with this shape and dtype."""
        return False

    @optional
    def add_rms_norm_own(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """The norm of add_rms_norm on every rank; row t of the new residual is written on rank t % R alone.

        It overwrites that row of residual_TD there; the rank's other rows are meaningless, before and after. `fits` is
        true of x; all three tensors have one dtype and are contiguous. May overwrite x.
        """
        raise AssertionError("left out")
