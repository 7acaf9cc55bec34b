"""Which captured graph a decode step replays, with a recorder in the place of CUDA's."""

from types import SimpleNamespace

import pytest
import torch

from hookline.core.contracts import NO_TOKEN, AttentionSpec
from hookline.core.step.message import Step
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.util.arrays import ints
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs, _Graph
from hookline.core.worker.request_table import RequestTable
from hookline.core.worker.runner.model_runner import PLAIN, Extras, ModelRunner


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of 2 and 4 rows whose replay returns the rows they were given; `recorded` lists what was captured."""
    device = torch.device("cpu")
    pipeline = SimpleNamespace(generation=0, is_graph_safe=lambda processors: processors != 4)
    runner = SimpleNamespace(table=SimpleNamespace(padding_row=9, device=device), pipeline=pipeline, begin=lambda: None)
    graphs = DecodeGraphs(runner, [2, 4], 64)
    graphs.recorded = []

    def record(size, is_shared, extras):
        rows_G = torch.zeros(size, dtype=torch.int64)
        graphs.recorded.append((size, extras))
        return _Graph(SimpleNamespace(replay=lambda: None), rows_G, rows_G)

    monkeypatch.setattr(graphs, "_record", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    graphs.capture(None)
    return graphs


def test_a_step_takes_the_smallest_graph_that_holds_it(graphs):
    assert graphs.launch(torch.tensor([5, 6, 7]), ints([5, 6, 7])).tolist() == [5, 6, 7]
    assert graphs.launch(torch.tensor([3]), ints([3])).tolist() == [3]
    assert graphs.recorded == [(4, PLAIN), (2, PLAIN)]


def test_rows_that_stay_are_not_sent_to_their_graph_again(graphs, monkeypatch):
    sent = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, rows_D: sent.append(rows_D.tolist()) or copy(to, rows_D))
    for rows in ([5, 6, 7], [5, 6, 7], [3], [5, 6, 7], [5, 6], [5, 6, 7], [3]):
        padded = [*rows, 9, 9, 9][: 4 if len(rows) > 2 else 2]
        assert graphs.launch(torch.tensor(rows), ints(rows)).tolist() == rows
        assert graphs._graphs[len(padded), False].rows_G.tolist() == padded
    assert sent == [[5, 6, 7], [3], [5, 6], [3]]


def test_a_graph_with_extras_is_captured_when_it_is_first_needed(graphs):
    extras = Extras(processors=3, num_logprobs=5)
    for _ in range(3):
        graphs.launch(torch.tensor([5, 6, 7]), ints([5, 6, 7]), extras)
    assert graphs.recorded[2:] == [(4, extras)]


def test_the_longest_unused_graph_with_extras_makes_room(graphs, monkeypatch):
    monkeypatch.setattr("hookline.core.worker.graphs.cuda_graph.MAX_EXTRA_GRAPHS", 2)
    one, two, three = (Extras(processors=number) for number in (1, 2, 3))
    for extras in (one, two, one, three, one, two):
        graphs.launch(torch.tensor([5]), ints([5]), extras)
    assert [extras for _, extras in graphs.recorded[2:]] == [one, two, three, two]
    graphs.launch(torch.tensor([5]), ints([5]))
    assert len(graphs.recorded) == 6  # plain graphs stay


def test_a_graph_with_extras_is_captured_anew_when_a_processor_was_made_anew(graphs):
    extras = Extras(processors=3)
    graphs.launch(torch.tensor([5]), ints([5]), extras)
    graphs.runner.pipeline.generation += 1
    for _ in range(2):
        graphs.launch(torch.tensor([5]), ints([5]), extras)
    assert graphs.recorded[2:] == [(2, extras)] * 2


def test_no_graph_holds_chunks_forbidden_tokens_or_processors_that_cannot_be_captured(graphs):
    assert graphs.can_replay(Step(decode_rows=ints([1])), Extras(3, 5))
    assert not graphs.can_replay(Step(decode_rows=ints([1])), Extras(4))
    assert not graphs.can_replay(Step(chunk_rows=ints([1])), PLAIN)
    assert not graphs.can_replay(Step(decode_rows=ints([1]), mask_rows=ints([0])), PLAIN)


def test_a_captured_step_that_draws_no_token_leaves_token_0_behind():
    table = RequestTable(4, 8, 16, 0, torch.device("cpu"))
    table.length_R[:2] = torch.tensor([3, 4], dtype=torch.int32)
    drawn_N = torch.tensor([NO_TOKEN, 7])
    spec = AttentionSpec(2, 2, 8, 16, 4, 64, 64, torch.device("cpu"), torch.float32)
    runner = ModelRunner.__new__(ModelRunner)
    runner.table, runner.kernels = table, PlainKernels(None, spec)
    runner.forward, runner.sample = lambda batch: torch.zeros(2, 1), lambda hidden_GD, _: drawn_N
    assert DecodeGraphs(runner, [2], 64).step(torch.tensor([0, 1])) is drawn_N
    assert table.last_token_R[:2].tolist() == [0, 7] and table.length_R[:2].tolist() == [4, 5]
