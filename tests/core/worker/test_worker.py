"""Which of a step's tokens a worker asks a model for, and what it takes for the answer."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hookline import LLM, SamplingParams
from hookline.core.contracts import Attend, AttentionSpec, StepShape, wanted_rows
from hookline.core.errors import RequestFault
from hookline.core.step.captured import PromptShape, joining, prompt_shapes
from hookline.core.step.message import Step
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from hookline.core.worker.graphs.prompt_graphs import PromptGraphs
from hookline.core.worker.runner.model_runner import Extras, ModelRunner
from hookline.core.worker.startup.warm_up import eager_steps, padding_step, row_shape, within
from hookline.core.worker.worker import Worker
from tests.batch_invariance import Load, one_after_the_other
from tests.hf_models import one_prompt
from tests.replayed_at_once import with_host_lengths


class EveryRow:
    """A token's hidden state is its id; notes how many were wanted and given."""

    def __init__(self) -> None:
        self.calls: list[tuple[int | None, int]] = []

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        rows_N = wanted_rows(attend)
        hidden_ND = self.some(token_ids_T.float().unsqueeze(1), rows_N)
        self.calls.append((None if rows_N is None else len(rows_N), len(hidden_ND)))
        return hidden_ND

    def some(self, hidden_TD: Tensor, rows_N: Tensor | None) -> Tensor:
        return hidden_TD


class WantedRows(EveryRow):
    def some(self, hidden_TD: Tensor, rows_N: Tensor | None) -> Tensor:
        return hidden_TD if rows_N is None else hidden_TD[rows_N]


@pytest.mark.parametrize("model_class", [EveryRow, WantedRows])
@pytest.mark.parametrize(
    ("tokens", "num_asked"),
    [(None, None), ([3], 1), ([], 1), ([4, 0, 0], 3), ([4, 3, 2, 1, 0], None), ([0, 1, 2, 3, 4, 4, 4], None)],
)
def test_the_hidden_states_are_those_of_the_tokens_named_whatever_the_model_computes(model_class, tokens, num_asked):
    model, runner = model_class(), ModelRunner.__new__(ModelRunner)
    runner.progress, runner.cache_scales = [0], {}
    runner.model, runner.kernels, runner.kv_layers = model, PlainKernels(None, cast(Any, None)), []
    batch = one_prompt([50, 51, 52, 53, 54])
    hidden_ND = runner.forward(batch, None if tokens is None else torch.tensor(tokens, dtype=torch.int64))
    assert hidden_ND.squeeze(1).tolist() == [50 + token for token in (range(5) if tokens is None else tokens)]
    given = num_asked if model_class is WantedRows and num_asked is not None else 5
    assert model.calls == [(num_asked, given)]


@pytest.fixture
def served():
    """An engine of the bundled model, its worker, and the forwards to come: tokens, rows asked for and rows given."""
    sizes = dict(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64, block_size=16, num_blocks=16)
    with LLM(device="cpu", dtype="float32", engine=sizes) as llm:
        worker: Worker = llm.engine.executor
        forwards: list[tuple[int, list[int] | None, int]] = []
        forward = worker.runner.model.forward

        def noted(token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
            hidden_ND, rows_N = forward(token_ids_T, positions_T, attend), wanted_rows(attend)
            assert rows_N is None or rows_N.dtype == torch.int64
            forwards.append((len(token_ids_T), None if rows_N is None else rows_N.tolist(), len(hidden_ND)))
            return hidden_ND

        worker.runner.model.forward = noted
        yield llm, worker, forwards


def test_the_engine_asks_for_the_rows_it_draws_from(served):
    llm, _, forwards = served
    prompts = [[1, 2, 3], [4, 5, 6, 7], list(range(20))]
    llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0))
    # Prompts first: two whole ones and 9 tokens of the third, the other 11; then all rows of decode steps.
    assert forwards[:3] == [(16, [2, 6], 2), (11, [10], 1), (3, None, 3)]


def test_a_chunk_that_nothing_is_drawn_from_is_asked_for_one_row(served):
    llm, _, forwards = served
    llm.generate([list(range(20))], SamplingParams(max_tokens=1, temperature=0))
    assert forwards == [(16, [0], 1), (4, [3], 1)]


def test_prompts_that_are_scored_are_computed_whole(served):
    llm, _, forwards = served
    llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert forwards == [(4, None, 4)]


def test_a_captured_prefill_asks_for_the_rows_it_draws_from(served):
    _, worker, _ = served
    prompts, shape = PromptGraphs(worker.runner, (), 64), PromptShape(32, 0, 4)
    step = Step(
        chunk_rows=np.array([0, 1]),
        chunk_starts=np.array([0, 0]),
        chunk_lens=np.array([3, 5]),
        token_ids_T=np.arange(8),
        sampled_chunks=np.array([0, 1]),
        max_context_len=5,
    )
    wanted = []

    def forward(batch: Any, tokens_N: Tensor) -> Tensor:
        wanted.append(tokens_N.tolist())
        return torch.zeros(len(tokens_N), 256)

    worker.runner.forward = forward
    with torch.inference_mode():
        assert len(prompts.step(prompts.inputs(step, shape), shape)) == 4
    assert wanted == [[2, 7, 0, 0]]


PLACE = AttentionSpec(4, 2, 64, 16, 4, 16, 64, torch.device("cpu"), torch.float32)


def test_a_rehearsal_computes_the_largest_step(served):
    _, worker, forwards = served
    worker.profile_run(PLACE)
    assert forwards == [(16, None, 16)]


class HeldBytes(TorchDispatchMode):
    """The most bytes held at a time of all tensors made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for storage, size in self.storages.values() if not storage.expired()))
        return made


def test_a_rehearsal_holds_the_hidden_states_of_two_steps_if_they_stay_on_the_device():
    sizes = dict(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64, block_size=16, num_blocks=16)
    with LLM(device="cpu", dtype="float32", engine={**sizes, "taps": (0, 1, 2)}) as llm:
        worker: Worker = llm.engine.executor
        worker._kept_names = frozenset(worker.runner.apart)
        spec = replace(PLACE, max_num_batched_tokens=64)
        step = padding_step(spec, within(spec, row_shape(spec, 64)), worker.table.padding_row)
        worker.launch(step)  # checks results, which later steps do not
        with HeldBytes() as served:
            handles = [worker.launch(step), worker.launch(step)]
        states = sum(kept_TD.nbytes for kept_TD in handles[0].kept.values())
        del handles
        with HeldBytes() as rehearsed:
            worker.profile_run(spec)
    assert rehearsed.peak > served.peak - states // 10  # the integers of the first step's message are held, too


def test_a_warm_up_computes_common_steps_and_those_that_kernels_name(served):
    _, worker, forwards = served
    worker.warm_up(PLACE, shares_prefixes=False)
    common = {num_tokens for num_tokens, _, _ in forwards}
    assert common == {1, 2, 4, 8, 16}
    worker.runner.kernels.own_row_counts = (3,)
    worker.runner.kernels.step_shapes = lambda: [StepShape(num_decodes=2, num_tokens=9)]
    forwards.clear()
    worker.warm_up(PLACE, shares_prefixes=False)
    assert {num_tokens for num_tokens, _, _ in forwards} == common | {3, 11}


@pytest.mark.parametrize(
    "seqs, tokens, length", [(1, 64, 8), (3, 64, 8), (8, 8192, 256), (11, 16384, 128), (64, 512, 64)]
)
def test_a_warm_up_draws_for_no_more_requests_than_there_may_be(seqs, tokens, length):
    spec = AttentionSpec(4, 2, 64, 16, seqs, tokens, length, torch.device("cpu"), torch.float32)
    kernels = PlainKernels(None, spec)
    kernels.own_row_counts = (1, 3, 64, 4096)
    kernels.step_shapes = lambda: [StepShape(2, 4096), StepShape(num_tokens=100, context_len=3), StepShape(500)]
    steps = list(eager_steps(spec, kernels, seqs, shares_prefixes=True))
    assert max(step.num_sampled for step in steps) <= seqs
    assert all(0 < step.num_tokens <= tokens and (step.chunk_lens > 0).all() for step in steps)
    assert all((step.chunk_starts >= 0).all() and step.max_context_len <= length for step in steps)


@pytest.mark.parametrize(
    ("num_rows", "draws"), [(1, 1), (16, 16), (64, 64), (100, 100), (101, 100), (4096, 100), (4097, 100), (8192, 100)]
)
def test_a_step_of_so_many_rows_has_them_all_and_as_many_draws_as_may_be(num_rows, draws):
    spec = AttentionSpec(4, 2, 64, 16, 100, 16384, 4096, torch.device("cpu"), torch.float32)
    step = padding_step(spec, within(spec, row_shape(spec, num_rows)), 100)
    assert step.num_tokens == num_rows
    assert step.num_sampled == draws


def test_a_warm_up_leaves_the_padding_row_as_it_was(served):
    _, worker, _ = served
    row = worker.table.padding_row
    worker.warm_up(PLACE, shares_prefixes=True)
    assert worker.table.host_length_R[row] == worker.table.length_R[row] == 1


def test_draws_that_fail_at_the_start_are_left_out_with_a_warning(served, monkeypatch, caplog):
    _, worker, _ = served
    truncation, broken = Extras(16), Extras(2)
    process = worker.runner.extensions.process

    def failing(logits_NV, extensions, *rest, **options):
        if extensions == broken.extensions:
            raise RequestFault("no luck", extensions=broken.extensions)
        return process(logits_NV, extensions, *rest, **options)

    monkeypatch.setattr(worker.runner.extensions, "process", failing)
    worker.prepared = [truncation, broken, Extras(0, 5)]
    worker.prepare_draws(PLACE)
    assert worker.prepared == [truncation, Extras(0, 5)]
    assert "draws are not made ready at the start: no luck" in caplog.text
    row = worker.table.padding_row
    assert worker.table.host_length_R[row] == worker.table.length_R[row] == 1


def test_a_rehearsal_of_graphs_computes_those_that_hold_most(served, monkeypatch):
    worker, shapes = served[1], []
    monkeypatch.setattr(DecodeGraphs, "step", lambda _, rows_G: shapes.append(len(rows_G)))
    monkeypatch.setattr(PromptGraphs, "step", lambda _, inputs, shape: shapes.append(shape))
    spec = AttentionSpec(4, 2, 64, 16, 100, 384, 4096, torch.device("cpu"), torch.float32)
    worker.profile_graphs(spec, prompt_shapes(100, 384, 4096))
    assert shapes[0] == 100 and set(shapes[1:]) == {PromptShape(384, 96, 4, 15), PromptShape(384, 0, 31, 15)}


class AtOnce(PromptGraphs):
    """Computes what a graph would replay, and notes which shapes were taken."""

    def __init__(self, runner: ModelRunner, shapes: list[PromptShape], max_model_len: int) -> None:
        super().__init__(runner, shapes, max_model_len)
        self.taken: list[tuple[int, int]] = []
        with_host_lengths(runner.kernels)

    def launch(self, step: Step, shape: PromptShape) -> Tensor:
        self.taken.append((len(step.decode_rows), shape.num_decodes))
        tokens_N = self.step(self.inputs(step, shape), shape)
        assert self.runner.table.length_R[self.runner.table.padding_row] == 1
        return tokens_N[: step.num_sampled]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("scheduler", "tokens"), [("chunked", 48), ("longest_first", 48), ("chunked", 2048), ("prefill_first", 2048)]
)
def test_what_graphs_of_mixed_steps_compute_gives_the_same_tokens(worded, scheduler, tokens, overlap):
    sizes = dict(max_num_batched_tokens=tokens, max_num_seqs=20, max_model_len=96, block_size=16, num_blocks=60)
    sizes["overlap"] = overlap
    shapes = prompt_shapes(20, tokens, 96, joined_decodes=128)
    prompts = [[(7 * index + place) % 250 for place in range(3 + 11 * index % 60)] for index in range(40)]
    params = [
        SamplingParams(max_tokens=4 + index % 25, ignore_eos=True, temperature=index % 2, seed=index)
        for index in range(40)
    ]
    with LLM(worded, device="cpu", dtype="float32", scheduler=scheduler, engine=sizes) as llm:
        plain = [output.token_ids for output in llm.generate(prompts, params)]
        llm.engine.pool.reset_cache()
        worker: Worker = llm.engine.executor
        graphs = worker.prompt_graphs = AtOnce(worker.runner, shapes, 96)
        plan = replace(llm.engine.limits.plan, joining=joining(shapes))
        llm.engine.state.limits = replace(llm.engine.limits, plan=plan)
        if tokens == 48:
            assert [output.token_ids for output in llm.generate(prompts, params)] == plain
            assert {decodes for _, decodes in graphs.taken} == {0, 16}
            assert any(0 < rows < 16 for rows, _ in graphs.taken) and any(rows > 16 for rows, _ in graphs.taken)
        else:
            assert [output.token_ids for output in one_after_the_other(llm, Load(prompts, params))] == plain
            assert {decodes for _, decodes in graphs.taken} == {0, 10}
            assert len({rows for rows, decodes in graphs.taken if decodes}) > 5


def test_a_closed_worker_has_let_go_of_the_cache_even_where_a_broken_steps_attention_still_names_it(served):
    llm, worker, _ = served
    layers = worker.runner.kv_layers  # the very list that every step's attention refers to
    assert len(layers) > 0
    llm.close()
    assert layers == [] and not hasattr(worker.runner, "kernels")
