"""Which captured graph a decode step replays, with a recorder in the place of CUDA's."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hookline.core.contracts import NO_TOKEN, AttentionSpec, SamplingBatch
from hookline.core.step.message import Step
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.util.arrays import ints
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from hookline.core.worker.request_table import RequestTable, SampleRows
from hookline.core.worker.runner.model_runner import PLAIN, Extras, ModelRunner


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of 2 and 4 rows whose draws return the rows they were given; `recorded` lists the draws captured, and
    `replayed` what was replayed, in order.
    """
    device = torch.device("cpu")
    extensions = SimpleNamespace(generation=0, is_graph_safe=lambda extensions: extensions != 4)
    extensions.treats_sizes_alike = lambda extensions: True
    extensions.layer_bits = lambda extensions: 0
    table = SimpleNamespace(padding_row=9, device=device)
    runner = SimpleNamespace(table=table, extensions=extensions, begin=lambda: None, checking=nullcontext)
    graphs = DecodeGraphs(runner, [2, 4], 64)
    graphs.recorded, graphs.replayed = [], []

    def layers(rows_G, is_shared=False):
        params = SamplingBatch(*(rows_G + garbage for garbage in (2**40, 2**41, 2**42)))
        return 10.0 * rows_G.unsqueeze(1), SampleRows(rows_G, None, params)

    def draws(hidden_GD, sampled, extras):
        assert sampled.rows_N.tolist() == [9] * len(hidden_GD), "a capture draws for the padding row alone"
        is_single = len(hidden_GD) == 1 and len(graphs.recorded) > 0  # whose layers write before it draws
        assert is_single or sampled.params.position_N.tolist() == [1] * len(hidden_GD)
        graphs.recorded.append((len(hidden_GD), extras))
        return sampled.rows_N

    def record(step, pool, device, first, *, is_known=False):
        what = {graphs.kept_layers: "layers", draws: "draws"}.get(step.func, "step")
        return SimpleNamespace(replay=lambda: graphs.replayed.append(what)), step()

    monkeypatch.setattr(graphs, "layers", layers)
    monkeypatch.setattr(graphs, "draws", draws)
    monkeypatch.setattr("hookline.core.worker.graphs.cuda_graph.record", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    graphs.capture(None)
    graphs.replayed.clear()
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
        assert graphs._layers[len(padded)].rows_G.tolist() == padded
    assert sent == [[5, 6, 7], [3], [5, 6], [3]]


def test_a_graph_with_extras_is_captured_when_it_is_first_needed(graphs):
    extras = Extras(extensions=3, num_logprobs=5)
    for _ in range(3):
        graphs.launch(torch.tensor([5, 6, 7]), ints([5, 6, 7]), extras)
    assert graphs.recorded[2:] == [(4, extras)]


def test_the_longest_unused_graph_with_extras_makes_room(graphs, monkeypatch):
    monkeypatch.setattr("hookline.core.worker.graphs.cuda_graph.MAX_EXTRA_GRAPHS", 2)
    one, two, three = (Extras(extensions=number) for number in (1, 2, 3))
    for extras in (one, two, one, three, one, two):
        graphs.launch(torch.tensor([5]), ints([5]), extras)
    assert [extras for _, extras in graphs.recorded[2:]] == [one, two, three, two]
    graphs.launch(torch.tensor([5]), ints([5]))
    assert len(graphs.recorded) == 6  # plain graphs stay


def test_a_graph_with_extras_is_captured_anew_when_a_processor_was_made_anew(graphs):
    extras = Extras(extensions=3)
    graphs.launch(torch.tensor([5]), ints([5]), extras)
    graphs.runner.extensions.generation += 1
    for _ in range(2):
        graphs.launch(torch.tensor([5]), ints([5]), extras)
    assert graphs.recorded[2:] == [(2, extras)] * 2


def test_draws_that_are_prepared_are_captured_with_the_plain_ones(graphs):
    extras, unsafe = Extras(extensions=3), Extras(extensions=4)
    graphs.recorded.clear()
    graphs.capture(None, [extras, unsafe])
    assert graphs.recorded == [(4, PLAIN), (4, extras), (2, PLAIN), (2, extras)]
    graphs.launch(torch.tensor([5]), ints([5]), extras)
    assert len(graphs.recorded) == 4


def test_draws_that_are_prepared_do_not_displace_each_other(graphs, monkeypatch):
    monkeypatch.setattr("hookline.core.worker.graphs.cuda_graph.MAX_EXTRA_GRAPHS", 1)
    prepared = [Extras(extensions=number) for number in (1, 2, 3)]
    graphs.capture(None, prepared)
    graphs.recorded.clear()
    for extras in [*prepared, Extras(extensions=5), *prepared]:
        graphs.launch(torch.tensor([5]), ints([5]), extras)
    assert graphs.recorded == [(2, Extras(extensions=5))]


def test_layers_are_replayed_once_and_before_the_draws(graphs):
    graphs.launch(torch.tensor([5]), ints([5]))
    for _ in range(2):
        graphs.launch(torch.tensor([5]), ints([5]), Extras(extensions=3))
    assert graphs.replayed == ["layers", "draws"] * 3


def test_a_plain_step_of_one_row_is_one_launch(graphs):
    graphs.sizes = [1, 2]
    graphs.capture(None)
    assert graphs.launch(torch.tensor([5]), ints([5])).tolist() == [5]
    assert graphs.replayed == ["step"]
    graphs.launch(torch.tensor([5, 6]), ints([5, 6]))
    graphs.launch(torch.tensor([5]), ints([5]), Extras(extensions=3))
    assert graphs.replayed[1:] == ["layers", "draws"] * 2


def test_layers_alone_give_the_hidden_states_of_the_rows_and_their_draws(graphs):
    sampled, hidden_DD = graphs.launch_layers(torch.tensor([5, 6, 7]), ints([5, 6, 7]), all_greedy=True)
    assert graphs.replayed == ["layers"]
    assert sampled.rows_N.tolist() == [5, 6, 7] and sampled.token_indices_N is None
    assert len(hidden_DD) == len(sampled.params.seed_N) == 3 and sampled.params.all_greedy


def test_which_steps_graphs_hold_and_for_which_they_draw(graphs):
    decodes = Step(decode_rows=ints([1]))
    assert graphs.can_replay(decodes) and not graphs.can_replay(Step(chunk_rows=ints([1])))
    assert graphs.can_sample(decodes, Extras(3, 5))
    assert not graphs.can_sample(decodes, Extras(4)), "a processor that cannot be captured"
    assert not graphs.can_sample(Step(decode_rows=ints([1]), forbidden_draws=ints([0])), PLAIN), "a forbidden token"


def test_a_captured_step_that_draws_no_token_leaves_token_0_behind():
    table = RequestTable(4, 8, 16, 0, torch.device("cpu"))
    table.length_R[:2] = torch.tensor([3, 4], dtype=torch.int32)
    drawn_N = torch.tensor([NO_TOKEN, 7])
    spec = AttentionSpec(2, 2, 8, 16, 4, 64, 64, torch.device("cpu"), torch.float32)
    runner = ModelRunner.__new__(ModelRunner)
    runner.table, runner.kernels = table, PlainKernels(None, spec)
    runner.forward, runner.sample = lambda batch, stream_TD=None: torch.zeros(2, 1), lambda hidden_GD, _: drawn_N
    assert DecodeGraphs(runner, [2], 64).step(torch.tensor([0, 1])) is drawn_N
    assert table.last_token_R[:2].tolist() == [0, 7] and table.length_R[:2].tolist() == [4, 5]
