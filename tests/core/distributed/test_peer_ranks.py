"""Ranks with an exchange: few rows go through it, the others through the group; a CPU has none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hookline.core.contracts import AttentionSpec, Exchange
from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS, Heartbeat
from hookline.core.distributed.peer_ranks import PeerRanks, with_copies, with_exchange
from hookline.core.distributed.process_group import ProcessRanks
from hookline.core.distributed.ranks import ALONE, LocalRanks
from hookline.core.testing.plain_kernels import PlainKernels

SPEC = AttentionSpec(4, 2, 16, 8, 4, 64, 64, torch.device("cpu"), torch.float32)


class FakeExchange(Exchange):
    """Sums over two ranks that hold the same; takes up to two rows."""

    def __init__(self):
        self.calls = []

    def fits(self, x_TD):
        return x_TD.shape[0] <= 2

    def all_reduce(self, x_TD):
        self.calls.append("all_reduce")
        return x_TD.mul_(2)

    def add_rms_norm(self, x_TD, residual_TD, weight_D, eps):
        self.calls.append("add_rms_norm")
        return PlainKernels(None, SPEC).add_rms_norm(x_TD * 2, residual_TD, weight_D, eps)

    def best_tokens(self, scores_N, tokens_N):
        self.calls.append("best_tokens")
        return tokens_N + 1


class FusedFakeExchange(FakeExchange):
    """Takes products of up to two rows too."""

    def linear_add_rms_norm(self, x_TD, weight_OD, bias_O, residual_TO, norm_weight_O, eps):
        if x_TD.shape[0] > 2:
            return None
        self.calls.append("linear_add_rms_norm")
        partial_TO = torch.nn.functional.linear(x_TD, weight_OD) * 2 + (0 if bias_O is None else bias_O)
        return PlainKernels(None, SPEC).add_rms_norm(partial_TO, residual_TO, norm_weight_O, eps)


class KeepingFakeExchange(FakeExchange):
    """Of two ranks: keeps a residual's even or odd rows, if it has two."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def keeps_own_rows(self, residual_TD):
        return residual_TD.shape[0] == 2

    def add_rms_norm_own(self, x_TD, residual_TD, weight_D, eps):
        self.calls.append("add_rms_norm_own")
        normed_TD, sum_TD = PlainKernels(None, SPEC).add_rms_norm(x_TD * 2, residual_TD.clone(), weight_D, eps)
        residual_TD[self.rank :: 2] = sum_TD[self.rank :: 2]
        return normed_TD


class FakeGroup:
    """A torch.distributed backend over two ranks that hold the same."""

    def allreduce(self, tensors, options):
        tensors[0].mul_(2)


def make():
    exchange = FakeExchange()
    return PeerRanks(0, 2, FakeGroup(), exchange=exchange), exchange


def test_few_rows_go_through_the_exchange_and_more_through_the_group():
    ranks, exchange = make()
    assert torch.equal(ranks.all_reduce(torch.ones(2, 4)), torch.full((2, 4), 2.0)) and exchange.calls == ["all_reduce"]
    assert torch.equal(ranks.all_reduce(torch.ones(3, 4)), torch.full((3, 4), 2.0)) and exchange.calls == ["all_reduce"]
    assert ranks.best_tokens(torch.zeros(5), torch.arange(5)).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_rows", (2, 3))
@pytest.mark.parametrize("exchange", (FakeExchange(), FusedFakeExchange()), ids=["plain", "fused"])
def test_a_product_with_its_sum_and_norm_is_left_to_the_exchange_where_that_takes_it(exchange, num_rows):
    heartbeat = Heartbeat(np.zeros(2 * HEARTBEAT_WORDS, dtype=np.int64), 0)
    ranks, kernels = PeerRanks(0, 2, FakeGroup(), heartbeat=heartbeat, exchange=exchange), PlainKernels(None, SPEC)
    x_TD, weight_OD, residual_TO = torch.randn(num_rows, 4), torch.randn(6, 4), torch.randn(num_rows, 6)
    norm_weight_O, before = torch.rand(6), heartbeat.progress
    exchange.calls.clear()
    found = ranks.linear_add_rms_norm(kernels, x_TD, weight_OD, None, residual_TO.clone(), norm_weight_O, 1e-6)
    expected = kernels.add_rms_norm(2 * x_TD @ weight_OD.T, residual_TO, norm_weight_O, 1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    is_fused = isinstance(exchange, FusedFakeExchange)
    calls = ["linear_add_rms_norm" if is_fused else "add_rms_norm"] if num_rows == 2 else []
    assert exchange.calls == calls and heartbeat.progress > before
    if is_fused and num_rows == 2:
        biased, _ = ranks.linear_add_rms_norm(
            kernels, x_TD, weight_OD, torch.ones(6), residual_TO.clone(), norm_weight_O, 1e-6
        )
        sum_TO = 2 * x_TD @ weight_OD.T + 1
        torch.testing.assert_close(biased, kernels.add_rms_norm(sum_TO, residual_TO, norm_weight_O, 1e-6)[0])


def test_each_sum_through_the_exchange_counts_as_getting_further_without_a_mark_on_the_device():
    heartbeat = Heartbeat(np.zeros(HEARTBEAT_WORDS, dtype=np.int64), 0)
    heartbeat.reach_collective = None
    ranks, x_TD = PeerRanks(0, 2, FakeGroup(), heartbeat=heartbeat, exchange=FakeExchange()), torch.ones(2, 4)
    ranks.all_reduce(x_TD)
    ranks.add_rms_norm(PlainKernels(None, SPEC), x_TD, x_TD.clone(), torch.ones(4), 1e-6)
    ranks.best_tokens(torch.zeros(2), torch.arange(2))
    assert heartbeat.progress == 3


def test_the_norm_of_a_sum_is_the_same_either_way():
    kernels, weight = PlainKernels(None, SPEC), torch.linspace(0.5, 1.5, 4)
    for num_rows in (2, 3):
        ranks, exchange = make()
        x, residual = torch.randn(num_rows, 4), torch.randn(num_rows, 4)
        expected = kernels.add_rms_norm(x * 2, residual.clone(), weight, 1e-6)
        actual = ranks.add_rms_norm(kernels, x.clone(), residual.clone(), weight, 1e-6)
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
        assert exchange.calls == (["add_rms_norm"] if num_rows == 2 else [])


class FakeCopies:
    """Notes what it is given."""

    def __init__(self):
        self.given, self.has_room = [], True

    def fits(self, chunks):
        return self.has_room

    def is_own(self, chunks):
        return torch.tensor([True, False, False, False, True])

    def add_rms_norm_each(self, kernels, partials, residual_chunks, weight_D, eps):
        self.given = list(partials)
        yield from self.given


def test_chunks_go_through_copies_and_a_whole_step_does_not():
    copies, kernels, weight = FakeCopies(), PlainKernels(None, SPEC), torch.ones(4)
    ranks = PeerRanks(0, 2, FakeGroup(), copies=copies)
    chunks = [torch.ones(3, 4), torch.ones(2, 4)]
    assert list(ranks.add_rms_norm_each(kernels, iter(chunks), [torch.zeros(3, 4), torch.zeros(2, 4)], weight, 1e-6))
    assert copies.given == chunks
    (normed,) = ranks.add_rms_norm_each(kernels, [torch.ones(3, 4)], residual := [torch.zeros(3, 4)], weight, 1e-6)
    assert copies.given == chunks and torch.equal(residual[0], torch.full((3, 4), 2.0))
    torch.testing.assert_close(normed, torch.ones(3, 4))


@pytest.mark.parametrize("what", ["copies", "a capture", "no room", "one chunk"])
def test_rows_of_a_residual_are_asked_of_whom_keeps_them_up_to_date(what, monkeypatch):
    """FakeGroup's two ranks hold the same: what a rank answers for alone comes back doubled, in the place of a sum."""
    copies = FakeCopies()
    copies.has_room = what != "no room"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: what == "a capture")
    residual_TD, rows_N = torch.randn(5, 4), torch.tensor([4, 0, 0, 3])
    residual_TD[3] = torch.nan
    chunks = [residual_TD] if what == "one chunk" else [residual_TD[:3], residual_TD[3:]]
    found_ND = PeerRanks(0, 2, FakeGroup(), copies=copies).residual_rows(chunks, rows_N)
    expected_ND = residual_TD[rows_N]
    if what == "copies":
        expected_ND = 2 * expected_ND
        expected_ND[3] = 0
    assert torch.equal(found_ND.nan_to_num(7.0), expected_ND.nan_to_num(7.0))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_residual_of_which_ranks_keep_rows_is_summed_up_and_asked_for_that_way(rank):
    exchange, kernels, weight = KeepingFakeExchange(rank), PlainKernels(None, SPEC), torch.linspace(0.5, 1.5, 4)
    ranks = PeerRanks(rank, 2, FakeGroup(), exchange=exchange)
    x, residual = torch.randn(2, 4), [torch.randn(2, 4)]
    expected_TD, sum_TD = kernels.add_rms_norm(x * 2, residual[0].clone(), weight, 1e-6)
    assert ranks.keeps_own_rows(residual[0]) and not ranks.keeps_own_rows(torch.zeros(1, 4))
    assert not make()[0].keeps_own_rows(residual[0])
    (normed_TD,) = ranks.add_rms_norm_each(kernels, iter([x]), residual, weight, 1e-6)
    assert torch.equal(normed_TD, expected_TD) and exchange.calls == ["add_rms_norm_own"]
    residual[0][1 - rank] = torch.nan
    found_ND = ranks.residual_rows(residual, torch.tensor([1, 0, 1]))
    expected_ND = torch.stack([sum_TD[row] * 2 * (row == rank) for row in (1, 0, 1)])
    assert torch.equal(found_ND, expected_ND)
    assert list(ranks.add_rms_norm_each(kernels, iter([x[:1]]), [torch.zeros(1, 4)], weight, 1e-6))
    assert exchange.calls[-1] == "add_rms_norm"


@pytest.mark.parametrize("unlike", ["partial", "weight", "size"])
def test_what_the_exchange_cannot_sum_up_by_rows_gives_the_same(unlike):
    """Of FakeGroup's two ranks each has both of the others' rows: the rows that this one keeps come back doubled."""
    exchange, kernels, weight = KeepingFakeExchange(0), PlainKernels(None, SPEC), torch.linspace(0.5, 1.5, 4)
    ranks = PeerRanks(0, 2, FakeGroup(), exchange=exchange)
    x, kept = torch.randn(2, 4), torch.randn(2, 4)
    whole = torch.stack([kept[0] * 2, torch.zeros(4)])
    expected_TD, sum_TD = kernels.add_rms_norm(x * 2, whole, weight, 1e-6)
    kept[1] = torch.nan
    if unlike == "partial":
        x = x.double()
    elif unlike == "weight":
        weight = weight.double()
    else:
        exchange.fits = lambda x_TD: False
    (normed_TD,) = ranks.add_rms_norm_each(kernels, iter([x]), [kept], weight, 1e-6)
    assert "add_rms_norm_own" not in exchange.calls
    torch.testing.assert_close(normed_TD.float(), expected_TD)
    torch.testing.assert_close(kept[0], sum_TD[0])


@pytest.mark.parametrize("what", ["a capture", "no room"])
def test_chunks_that_copies_cannot_take_go_through_the_group(what, monkeypatch):
    """A graph would repeat signals that the host counts: decodes of thousands of rows are captured, too."""
    copies, kernels, weight = FakeCopies(), PlainKernels(None, SPEC), torch.ones(4)
    copies.has_room = what != "no room"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: what == "a capture")
    ranks, residual = PeerRanks(0, 2, FakeGroup(), copies=copies), [torch.zeros(3, 4), torch.zeros(2, 4)]
    norms = list(ranks.add_rms_norm_each(kernels, [torch.ones(3, 4), torch.ones(2, 4)], residual, weight, 1e-6))
    assert copies.given == [] and [len(norm) for norm in norms] == [3, 2]
    assert all(torch.equal(one, torch.full_like(one, 2.0)) for one in residual)


def test_copies_are_for_gpus_alone():
    assert with_copies(ALONE, SPEC, 64) is ALONE
    ranks = ProcessRanks(0, 2, FakeGroup())
    assert with_copies(ranks, SPEC, 64) is ranks


def test_without_a_gpu_or_an_offer_ranks_stay_as_they_are():
    offering = SimpleNamespace(exchange=lambda peers: None)
    assert with_exchange(ALONE, offering, SPEC, 64) is ALONE
    ranks = LocalRanks(0, 2)
    assert with_exchange(ranks, offering, SPEC, 64) is ranks


def test_sums_of_many_rows_by_copies_count_as_progress_like_those_of_the_group():
    reached = []
    heartbeat = SimpleNamespace(reach_collective=lambda: reached.append(1))
    copies = FakeCopies()
    ranks, chunks = (
        PeerRanks(0, 2, FakeGroup(), heartbeat=heartbeat, copies=copies),
        [torch.ones(3, 4), torch.ones(3, 4)],
    )
    assert len(list(ranks.add_rms_norm_each(None, chunks, chunks, torch.ones(4), 1e-6))) == 2
    assert len(reached) == 1
    ranks.all_reduce(torch.ones(3, 4))
    assert len(reached) == 2
