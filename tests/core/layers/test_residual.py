"""The residual stream over ranks, in chunks and for some rows equals plain torch; and in which order it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import AttentionSpec, Runtime
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.layers import Residual, RowParallelLinear
from hookline.core.testing.model_suite.thread_ranks import ThreadRanks, on_ranks
from hookline.core.testing.plain_kernels import PlainKernels
from tests.forgetful_ranks import ForgetfulRanks, ForgetfulWholes

TOKENS, HIDDEN, INNER, EPS = 11, 8, 12, 1e-5


class ThreeChunks(ThreadRanks):
    def num_chunks(self, num_rows: int) -> int:
        return 3


KINDS = [
    (ThreadRanks, 1),
    (ThreadRanks, 2),
    (ThreeChunks, 1),
    (ThreeChunks, 4),
    (ForgetfulRanks, 2),
    (ForgetfulWholes, 2),
]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X_TD, NORMS_4D = random(TOKENS, HIDDEN, seed=0), 1 + 0.1 * random(4, HIDDEN, seed=1)
UP_FD, DOWN_DF, BIAS_D = random(INNER, HIDDEN, seed=2), random(HIDDEN, INNER, seed=3), random(HIDDEN, seed=4)


def norm(x_TD: Tensor, index: int) -> Tensor:
    return functional.rms_norm(x_TD, (HIDDEN,), NORMS_4D[index], EPS)


def up(x_TD: Tensor) -> Tensor:
    return functional.silu(x_TD @ UP_FD.T)


def down(x_TF: Tensor) -> Tensor:
    return functional.linear(x_TF, DOWN_DF, BIAS_D)


def block(x_TD: Tensor) -> Tensor:
    """The whole of what the ranks compute together."""
    return down(up(x_TD))


class Part:
    """One rank's share of `block`: its features, and the linear that the residual adds through."""

    def __init__(self, ranks: LocalRanks) -> None:
        self.runtime = make_runtime(ranks)
        self.down = RowParallelLinear(INNER, HIDDEN, self.runtime, bias=True)
        for name, target in self.down.targets("down").items():
            assert target.view is not None
            target.view.copy_(target.cut(DOWN_DF if name == "down.weight" else BIAS_D))

    def up(self, x_TD: Tensor) -> Tensor:
        return up(x_TD).chunk(self.runtime.ranks.size, -1)[self.runtime.ranks.rank]


def make_runtime(ranks: LocalRanks, kernels: Any = None) -> Runtime:
    plain = PlainKernels(None, cast(AttentionSpec, None))
    return Runtime(torch.device("cpu"), torch.float64, ranks, kernels or plain)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.core.distributed.ranks.ROW_TILE", 2)


def check(kind: type[ThreadRanks], size: int, forward: Callable[[Residual, Part], Tensor], expected: Tensor) -> None:
    """`forward` gives `expected` on every rank, whether it may take chunks or not."""

    def work(ranks: LocalRanks) -> Tensor:
        part = Part(ranks)
        return forward(Residual(X_TD.clone(), EPS, part.runtime), part)

    for found in on_ranks(size, work, kind):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("kind", "size"), KINDS)
@pytest.mark.parametrize("wanted", [None, [10], [0, 0, 7, 3], list(range(TOKENS))[::-1]])
@pytest.mark.parametrize("kept_behind", [0, 1, 2])
@pytest.mark.parametrize("by_chunk", [False, True])
def test_layers_over_ranks_equal_plain_torch(
    kind: type[ThreadRanks], size: int, wanted: list[int] | None, kept_behind: int, by_chunk: bool
) -> None:
    mixed_TD = X_TD + down(up(norm(X_TD, 0)).cumsum(0))  # as attention: a row needs those before it
    fed_TD = mixed_TD + block(norm(mixed_TD, 1))
    expected_TD = norm(fed_TD + block(norm(fed_TD, 2)), 3)

    def forward(residual: Residual, part: Part) -> Tensor:
        residual.add(residual.norm(NORMS_4D[0], part.up).cumsum(0), through=part.down)
        for index in (0, 1, 2):
            if by_chunk and index:
                residual.add(map(part.up, residual.norm_each(NORMS_4D[index])), through=part.down)
            elif index:
                residual.add(part.up(residual.norm(NORMS_4D[index])), through=part.down)
            if index == kept_behind:
                residual.keep(None if wanted is None else torch.tensor(wanted))
        return residual.norm(NORMS_4D[3])

    check(kind, size, forward, expected_TD if wanted is None else expected_TD[wanted])


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_blocks_may_stand_beside_each_other(kind: type[ThreadRanks], size: int) -> None:
    once_TD = X_TD + block(norm(X_TD, 0))
    expected_TD = norm(once_TD + block(norm(once_TD, 1)) + block(norm(once_TD, 2)), 3)

    def forward(residual: Residual, part: Part) -> Tensor:
        residual.add(map(part.up, residual.norm_each(NORMS_4D[0])), through=part.down)
        inner = [part.up(residual.norm(NORMS_4D[index])) for index in (1, 2)]
        for inner_TF in inner:
            residual.add(inner_TF, through=part.down)
        return residual.norm(NORMS_4D[3])

    check(kind, size, forward, expected_TD)


@pytest.mark.parametrize(("kind", "size"), KINDS)
@pytest.mark.parametrize("by_chunk", [False, True])
def test_an_output_that_is_whole_on_every_rank_is_added_as_it_is(
    kind: type[ThreadRanks], size: int, by_chunk: bool
) -> None:
    """As of models that normalise a block's output."""
    once_TD = X_TD + block(norm(X_TD, 0))
    expected_TD = norm(once_TD + norm(block(norm(once_TD, 1)), 2), 3)

    def forward(residual: Residual, part: Part) -> Tensor:
        def normed_block(x_TD: Tensor) -> Tensor:
            return norm(part.down(part.up(x_TD)), 2)

        residual.add(part.up(residual.norm(NORMS_4D[0])), through=part.down)
        if by_chunk:
            residual.add(map(normed_block, residual.norm_each(NORMS_4D[1])))
        else:
            residual.add(normed_block(residual.norm(NORMS_4D[1])))
        return residual.norm(NORMS_4D[3])

    check(kind, size, forward, expected_TD)


@pytest.mark.parametrize(("kind", "size"), KINDS)
@pytest.mark.parametrize("rows", [None, [4, 1]])
def test_nothing_added_is_the_norm_of_the_start(kind: type[ThreadRanks], size: int, rows: list[int] | None) -> None:
    def forward(residual: Residual, part: Part) -> Tensor:
        residual.keep(None if rows is None else torch.tensor(rows))
        return residual.norm(NORMS_4D[0])

    check(kind, size, forward, norm(X_TD, 0) if rows is None else norm(X_TD, 0)[rows])


@dataclass(frozen=True)
class TwoChunks(LocalRanks):
    """A single rank that cuts all the same."""

    def num_chunks(self, num_rows: int) -> int:
        return 2


@dataclass
class Log:
    """A block that says when it computes what."""

    runtime: Runtime
    name: str
    entries: list[str] = field(default_factory=list)

    def local(self, x_TF: Tensor) -> Tensor:
        self.entries.append(f"{self.name} of {len(x_TF)}")
        return x_TF.clone()

    def add_rms_norm(self, x_TF: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float) -> Any:
        self.entries.append(f"{self.name} and norm of {len(x_TF)}")
        return self.runtime.kernels.add_rms_norm(x_TF.clone(), residual_TD, norm_weight_D, eps)


def order(ranks: LocalRanks, **options: Any) -> list[str]:
    """What two blocks compute, one behind the other."""
    runtime, entries = make_runtime(ranks), list[str]()
    residual = Residual(X_TD.clone(), EPS, runtime, **options)
    residual.add(X_TD, through=Log(runtime, "output", entries))
    residual.add(residual.norm_each(NORMS_4D[0]), through=Log(runtime, "down", entries))
    assert not entries
    residual.norm(NORMS_4D[1])
    return entries


def test_an_addition_waits_for_the_norm_and_is_one_operation_with_it() -> None:
    assert order(LocalRanks()) == ["output and norm of 11", "down and norm of 11"]


def test_a_chunk_reaches_the_next_block_before_the_chunk_behind_it_is_computed() -> None:
    assert order(TwoChunks()) == ["output of 6", "down of 6", "output of 5", "down of 5"]


def test_blocks_that_need_all_rows_at_once_get_them() -> None:
    assert order(TwoChunks(), in_chunks=False) == ["output and norm of 11", "down and norm of 11"]


@pytest.mark.parametrize("ranks", [LocalRanks(), TwoChunks()])
@pytest.mark.parametrize("use", ["norm", "add", "add chunks", "keep"])
def test_a_norm_of_which_chunks_were_not_taken_is_not_forgotten(ranks: LocalRanks, use: str) -> None:
    runtime = make_runtime(ranks)
    residual = Residual(X_TD.clone(), EPS, runtime)
    residual.add(X_TD, through=Log(runtime, "output"))
    next(residual.norm_each(NORMS_4D[0]))
    uses: dict[str, Callable[[], object]] = {
        "norm": lambda: residual.norm(NORMS_4D[1]),
        "add": lambda: residual.add(X_TD, through=Log(runtime, "down")),
        "add chunks": lambda: residual.add(X_TD.split([6, 5])),
        "keep": lambda: residual.keep(torch.tensor([1])),
    }
    with pytest.raises(RuntimeError, match="before all chunks of its last norm_each were taken"):
        uses[use]()


class Reading(RowParallelLinear):
    """A block whose weight is said to be quantised, and that keeps what it is told reads its norms."""

    reads = None

    def add_rms_norm(self, x_TD, residual_TO, norm_weight_O, eps, then=None):
        self.told.append(then)
        return super().add_rms_norm(x_TD, residual_TO, norm_weight_O, eps)


def test_a_norm_is_told_which_quantised_matrix_alone_reads_it():
    runtime = make_runtime(LocalRanks())
    blocks = [Reading(HIDDEN, HIDDEN, runtime) for _ in range(2)]
    for block, matrix in zip(blocks, ("first", "second"), strict=True):
        block.weight_OD.fill_(0.1)
        block.reads, block.told = matrix, []
    first, second = blocks
    residual = Residual(X_TD.clone(), EPS, runtime)
    residual.add(residual.norm(NORMS_4D[0]), through=first)
    residual.add(residual.norm_each(NORMS_4D[1]), through=second)  # computed with the next norm
    residual.norm(NORMS_4D[2], second)
    assert (first.told, second.told) == (["second"], ["second"])
    residual.add(residual.norm(NORMS_4D[0]), through=first)
    residual.add(residual.norm_each(NORMS_4D[1]), through=second)
    residual.keep(torch.arange(3))  # the rows are chosen of a plain norm
    residual.norm(NORMS_4D[2])
    assert (first.told[1:], second.told[1:]) == ([None], [None])
