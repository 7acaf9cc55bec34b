"""Sums in the order of the ranks, with a stand-in for torch.distributed that has gathered what the ranks hold."""

from typing import Any

import torch
from torch import Tensor

from hookline.core.distributed.process_group import OrderedRanks, ProcessRanks, in_order
from hookline.core.distributed.ranks import ALONE


class Gathering:
    """A torch.distributed backend over ranks that hold these."""

    def __init__(self, held: list[Tensor]) -> None:
        self.held = held

    def _allgather_base(self, parts: Tensor, own: Tensor, options: Any) -> None:
        parts.copy_(torch.cat(self.held))


def test_sums_are_in_the_order_of_the_ranks_and_rounded_once() -> None:
    held = [torch.tensor([[value, value]]).bfloat16() for value in (256.0, 1.0, 1.0)]
    for rank, own in enumerate(held):
        ranks = in_order(ProcessRanks(rank, 3, Gathering(held)))
        summed = ranks.all_reduce(own.clone())
        assert summed.tolist() == [[258.0, 258.0]], "in bfloat16, 256 + 1 is 256"
        assert summed.dtype == torch.bfloat16


def test_rows_get_the_same_bits_however_many_are_summed() -> None:
    held = [torch.randn(50, 7, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    whole = OrderedRanks(0, 4, Gathering(held)).all_reduce(held[0].clone())
    assert torch.equal(whole, ((held[0] + held[1]) + held[2]) + held[3])
    for some in (slice(3, 4), slice(10, 31)):
        few = OrderedRanks(0, 4, Gathering([one[some] for one in held])).all_reduce(held[0][some].clone())
        assert torch.equal(few, whole[some])


def test_all_that_ranks_have_is_kept_and_a_single_rank_stays_as_it_is() -> None:
    ranks = ProcessRanks(1, 2, Gathering([]), shared=[print])
    ordered = in_order(ranks)
    assert isinstance(ordered, OrderedRanks)
    assert (ordered.rank, ordered.size, ordered.shared, ordered.group) == (1, 2, ranks.shared, ranks.group)
    assert in_order(ALONE) is ALONE
