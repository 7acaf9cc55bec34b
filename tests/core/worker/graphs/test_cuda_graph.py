"""Which steps are run before they are captured, with a recorder in the place of CUDA's graphs."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from hookline.core.contracts import SamplingBatch
from hookline.core.step.captured import PromptShape
from hookline.core.worker.graphs import cuda_graph
from hookline.core.worker.graphs.cuda_graph import GraphPool, record
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs, capture_graphs
from hookline.core.worker.graphs.prompt_graphs import PromptGraphs
from hookline.core.worker.request_table import SampleRows
from hookline.core.worker.runner.model_runner import PLAIN, Extras

DEVICE = torch.device("cpu")
RUN_BEFORE, AT_ONCE = ["run", "global", "captured"], ["relaxed", "captured", "replay"]


@pytest.fixture
def cuda(monkeypatch):
    """What happens, in order."""
    cuda = SimpleNamespace(events=[], is_capturing=False)

    class Graph:
        def replay(self):
            cuda.events.append("replay")

    @contextmanager
    def graph(graph, pool=None, capture_error_mode="global"):
        cuda.events.append(capture_error_mode)
        cuda.is_capturing = True
        try:
            yield
        finally:
            cuda.is_capturing = False

    names = {
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda: None,
        "set_stream": lambda stream: None,
        "synchronize": lambda device: None,
        "memory_reserved": lambda device: 0,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph, "run_before", lambda step, device, first: step())
    monkeypatch.setattr(GraphPool, "end_broken", lambda self, graph: cuda.events.append("ended"))
    return cuda


@pytest.fixture
def step(cuda):
    def step():
        cuda.events.append("captured" if cuda.is_capturing else "run")
        return torch.zeros(100, dtype=torch.int64)

    return step


def test_a_step_of_a_new_kind_is_run_before_its_capture(cuda, step):
    record(step, GraphPool(captures_at_once=True), DEVICE, nullcontext())
    assert cuda.events == RUN_BEFORE


def test_a_step_of_a_known_kind_is_captured_at_once_and_loaded_by_a_replay(cuda, step):
    record(step, GraphPool(captures_at_once=True), DEVICE, nullcontext(), is_known=True)
    assert cuda.events == AT_ONCE


@pytest.mark.parametrize("has_pool", [False, True])
def test_without_leave_to_do_so_a_known_kind_is_run_before_too(cuda, step, has_pool):
    record(step, GraphPool() if has_pool else None, DEVICE, nullcontext(), is_known=True)
    assert cuda.events == RUN_BEFORE


def test_a_step_that_fails_when_it_is_captured_at_once_says_why_and_ends_the_capture(cuda):
    def failing():
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        record(failing, GraphPool(captures_at_once=True), DEVICE, nullcontext(), is_known=True)
    assert cuda.events == ["relaxed", "ended"]


@pytest.fixture
def recorded(cuda, monkeypatch):
    """What the graphs of an engine ask `record` for: (rows or tokens, is_known, captures_at_once)."""
    recorded = []

    def note(step, pool, device, first, *, is_known=False):
        number = getattr(step.args[0], "rows_G", step.args[0]).numel()
        recorded.append((number, is_known, pool.captures_at_once))
        hidden = torch.zeros(number, 1)
        is_layers = step.func.__name__ == "kept_layers"
        sampled = SampleRows(hidden, None, SamplingBatch(*[hidden] * 3))
        return SimpleNamespace(replay=lambda: None), (hidden, sampled) if is_layers else hidden

    monkeypatch.setattr(cuda_graph, "record", note)
    return recorded


def graphs():
    """Decodes of 2, 4 and 8 rows, with and without shared prefixes, and steps with prompts of 4, 6 and 8 tokens."""
    table = SimpleNamespace(device=DEVICE, padding_row=0)
    extensions = SimpleNamespace(generation=0, layer_bits=lambda extensions: 0)
    runner = SimpleNamespace(table=table, extensions=extensions, checking=nullcontext)
    prompts = PromptGraphs(runner, [PromptShape(tokens, 1, 0) for tokens in (4, 6, 8)], 64)
    prompts.inputs = lambda step, shape: torch.zeros(shape.num_tokens)
    return DecodeGraphs(runner, [2, 4, 8], 64, shares_prefixes=True), prompts


@pytest.mark.parametrize("at_once", [False, True])
def test_the_first_size_of_each_kind_is_run_before(recorded, at_once):
    decodes, prompts = graphs()
    capture_graphs(decodes, prompts, at_once=at_once)
    of_prompts = [(8, False), (8, False), (6, True), (6, True), (4, True), (4, True)]
    of_decodes = [*[(8, False)] * 3, *[(4, True)] * 3, *[(2, True)] * 3]  # layers, those that share, and draws
    assert recorded == [(*one, at_once) for one in of_prompts + of_decodes]


@pytest.mark.parametrize("sizes_alike", [False, True])
def test_graphs_with_processors_are_run_before_unless_these_treat_sizes_alike(recorded, sizes_alike):
    decodes, prompts = graphs()
    decodes.runner.extensions.treats_sizes_alike = lambda extensions: sizes_alike
    capture_graphs(decodes, prompts, at_once=True)
    recorded.clear()
    extras = Extras(extensions=1)
    with torch.inference_mode():
        for size in (2, 4):
            decodes._record_draws(size, extras)
    assert extras != PLAIN and recorded == [(2, False, True), (4, sizes_alike, True)]
