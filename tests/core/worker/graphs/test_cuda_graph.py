"""How steps are captured, with a recorder in the place of CUDA's graphs."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from hookline.core.worker.graphs import cuda_graph
from hookline.core.worker.graphs.cuda_graph import GraphPool, NotAtOnce, record
from hookline.core.worker.graphs.decode_graphs import capture_graphs

DEVICE = torch.device("cpu")


@pytest.fixture
def told(monkeypatch):
    """What happened, in order; `allocated` is what torch has allocated on the device."""
    told = SimpleNamespace(events=[], allocated=0, is_capturing=False)

    class Graph:
        def replay(self):
            told.events.append("replay")

    @contextmanager
    def graph(graph, pool=None, capture_error_mode="global"):
        told.events.append(capture_error_mode)
        told.is_capturing = True
        try:
            yield
        finally:
            told.is_capturing = False

    names = {
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda: None,
        "set_stream": lambda stream: None,
        "synchronize": lambda device: None,
        "memory_allocated": lambda device: told.allocated,
        "memory_reserved": lambda device: 0,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph, "run_before", lambda step, device, first: step())
    monkeypatch.setattr(GraphPool, "end_broken", lambda self, graph: told.events.append("ended"))
    return told


def stepping(told, keeps=0, fails=False):
    """A step of 100 tokens, which keeps this many bytes besides them."""

    def step():
        told.events.append("captured" if told.is_capturing else "run")
        if fails and told.is_capturing:
            raise RuntimeError("waits for the device")
        told.allocated += 1024 + keeps  # of 800 bytes
        return torch.zeros(100, dtype=torch.int64)

    return step


def test_a_step_of_a_new_kind_is_run_before_its_capture(told):
    record(stepping(told), GraphPool(captures_at_once=True), DEVICE, nullcontext())
    assert told.events == ["run", "global", "captured"]


def test_a_step_of_a_known_kind_is_captured_at_once_and_replayed(told):
    record(stepping(told), GraphPool(captures_at_once=True), DEVICE, nullcontext(), is_known=True)
    assert told.events == ["relaxed", "captured", "replay"]


@pytest.mark.parametrize("pool", [None, "plain"])
def test_only_a_pool_whose_graphs_can_be_dropped_captures_at_once(told, pool):
    record(stepping(told), GraphPool() if pool else None, DEVICE, nullcontext(), is_known=True)
    assert told.events == ["run", "global", "captured"]


def test_what_is_kept_is_computed_and_told(told):
    with pytest.raises(NotAtOnce, match="512 bytes that were made for its size are kept"):
        record(stepping(told, keeps=512), GraphPool(captures_at_once=True), DEVICE, nullcontext(), is_known=True)
    assert told.events[-1] == "replay"


def test_a_step_that_fails_is_ended_and_told(told):
    with pytest.raises(NotAtOnce, match="waits for the device"):
        record(stepping(told, fails=True), GraphPool(captures_at_once=True), DEVICE, nullcontext(), is_known=True)
    assert told.events == ["relaxed", "captured", "ended"]


class Sizes:
    """Captures its sizes; from `bad` on, steps keep memory."""

    def __init__(self, told, sizes, bad=0):
        table = SimpleNamespace(device=DEVICE)
        self.runner = SimpleNamespace(table=table, ranks=SimpleNamespace(size=1))
        self.told, self.sizes, self.bad, self.graphs = told, sizes, bad, {}

    def capture(self, pool):
        self.graphs = {}
        for size in self.sizes:
            step = stepping(self.told, keeps=512 * (size == self.bad))
            self.graphs[size] = record(step, pool, DEVICE, nullcontext(), is_known=bool(self.graphs))
        self.pool = pool
        return len(self.graphs)


def test_graphs_are_captured_again_each_after_a_run_if_a_plugin_does_not_bear_it(told, caplog):
    decodes, prompts = Sizes(told, [8, 4, 2], bad=4), Sizes(told, [64, 32])
    with caplog.at_level("INFO", logger="hookline"):
        capture_graphs(decodes, prompts)
    first = ["run", "global", "captured"]
    at_once = ["relaxed", "captured", "replay"]
    assert told.events == [*first, *at_once, *first, *at_once, *first * 5]
    assert decodes.pool is prompts.pool and not decodes.pool.captures_at_once
    assert "graphs are captured again, each after a run: 512 bytes" in caplog.text
    assert "captured 3 graphs of decodes and 2 with prompts" in caplog.text


def test_ranks_run_each_step_before_its_capture(told):
    decodes, prompts = Sizes(told, [8, 4]), Sizes(told, [64])
    decodes.runner.ranks.size = 2
    capture_graphs(decodes, prompts)
    assert told.events == ["run", "global", "captured"] * 3
