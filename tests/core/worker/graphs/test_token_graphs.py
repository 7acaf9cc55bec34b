"""Steps with drafts as graphs, replayed without a GPU: requests get what they get without, whatever they ask for."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline import LLM, SamplingParams
from hookline.core.contracts import DrafterSpec
from hookline.core.plugin import sources
from hookline.core.speculation import rank
from hookline.core.speculation.speculation import DeviceDrafting
from hookline.core.step.captured import TOKEN_ROWS, prompt_shapes, token_sizes
from hookline.core.step.message import Step
from hookline.core.worker import worker as worker_module
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from hookline.core.worker.graphs.prompt_graphs import PromptGraphs
from hookline.core.worker.graphs.token_graphs import LAST_DRAWN, TokenGraphs, lay_out
from hookline.core.worker.request_table import RequestTable
from hookline.core.worker.results.token_transfer import send_apart
from hookline.plugins.drafters import SyntheticConfig
from hookline.plugins.drafters.synthetic import Synthetic
from tests.core.worker.graphs.test_replayed_steps import MORE, answer
from tests.replayed_at_once import replay_at_once, with_host_lengths

SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 96, "block_size": 16, "num_blocks": 60}


@pytest.fixture(autouse=True)
def _drafters(monkeypatch):
    monkeypatch.setenv(sources.DEVELOPMENT_VARIABLE, "tests.odd_drafters")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["suffix", "random"])
@pytest.mark.parametrize("asked", [[{}], MORE], ids=["plain", "with extensions"])
def test_graphs_of_drafts_give_what_is_drawn_without(monkeypatch, worded, drafter, asked):
    prompts = [[(index + place % 5) % 250 for place in range(9 + 3 * index)] for index in range(20)]
    params = [
        SamplingParams(max_tokens=6 + index % 25, ignore_eos=True, temperature=index % 2, seed=index, **more)
        for index, more in zip(range(20), cycle(asked), strict=False)
    ]
    with LLM(worded, device="cpu", dtype="float32", engine=SIZES) as llm:
        plain = [answer(output, partial(pytest.approx, abs=1e-5)) for output in llm.generate(prompts, params)]
    with LLM(worded, device="cpu", dtype="float32", drafter=drafter, engine=SIZES) as llm:
        graphs = replay_steps(llm, monkeypatch)
        outputs = llm.generate(prompts, params)
        counts = llm.engine.speculation
    assert [answer(output) for output in outputs] == plain
    assert counts.num_drafted > 50 and (drafter == "random" or counts.num_kept > 10)
    steps = graphs[0]
    assert drafter == "random" or sum(len(step.decode_rows) > 0 for step in steps) > 3, (
        "rows with drafts beside rows without"
    )
    assert all(len(step.sampled_chunks) == len(step.token_ids_T) for step in steps)
    assert sum(graph.count > 1 for graph in graphs[1]) > 5


def replay_steps(llm, monkeypatch, max_model_len=96):
    """From now on the engine's steps are graphs. Returns the steps that graphs of drafts compute, and all graphs."""
    worker, steps = llm.engine.executor, []
    graphs = replay_at_once(monkeypatch)
    with_host_lengths(worker.runner.kernels)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    send = worker.transfer.send  # a copy, as to the host: the next replay may come before these are collected
    monkeypatch.setattr(worker.transfer, "send", lambda tokens_N: send(tokens_N.clone()))
    monkeypatch.setattr(worker_module, "send_apart", lambda rows_NX: send_apart(rows_NX.clone()))
    has_taps = len(worker.runner.apart) > 0
    decodes = DecodeGraphs(worker.runner, [] if has_taps else [1, 2, 4, 8], max_model_len)
    shapes = [] if has_taps else prompt_shapes(8, 2048, max_model_len)
    prompts = PromptGraphs(worker.runner, shapes, max_model_len)
    drafts = TokenGraphs(worker.runner, token_sizes(8, 2048), max_model_len)
    replay = drafts.replay_layers
    monkeypatch.setattr(drafts, "replay_layers", lambda step, size: steps.append(step) or replay(step, size))
    for name, made in (("graphs", decodes), ("prompt_graphs", prompts), ("token_graphs", drafts)):
        monkeypatch.setattr(worker, name, made)
        with torch.inference_mode():
            made.capture(None)
    return steps, graphs


def test_a_step_is_laid_out_token_by_token():
    table = RequestTable(6, 4, 16, 99, torch.device("cpu"))
    table.host_length_R[[2, 4]] = 7, 9
    step = Step(
        decode_rows=np.array([4, 2]),
        chunk_rows=np.array([1, 3]),
        chunk_starts=np.array([20, 5]),
        chunk_lens=np.array([3, 1]),
        token_ids_T=np.array([70, 71, 72, 50]),
        sampled_chunks=np.array([0, 0, 0, 1]),
    )
    assert lay_out(step, 8, table).tolist() == [
        [LAST_DRAWN, LAST_DRAWN, 70, 71, 72, 50, 0, 0],
        [8, 6, 20, 21, 22, 5, 0, 0],
        [4, 2, 1, 1, 1, 3, 6, 6],
    ]


@pytest.mark.parametrize(
    ("fields", "size", "taps"),
    [
        ({"chunk_lens": [5], "sampled_chunks": [0] * 5}, 5, []),
        ({"chunk_lens": [5], "sampled_chunks": [0] * 5, "decode_rows": [1, 2]}, 8, []),
        ({"chunk_lens": [1], "sampled_chunks": [0]}, 2, []),
        ({"chunk_lens": [6], "sampled_chunks": [0] * 5}, None, []),
        ({"chunk_lens": [5, 2], "sampled_chunks": [0] * 5 + [1]}, None, []),
        ({"chunk_lens": [200], "sampled_chunks": [0] * 200}, None, []),
        ({"chunk_lens": [5], "sampled_chunks": [0] * 5, "reads": [0, 0, 0, 0]}, None, []),
        ({"decode_rows": [1, 2]}, None, []),
        ({"decode_rows": [1, 2]}, 2, [0]),
        ({"chunk_lens": [6], "sampled_chunks": [0] * 5, "decode_rows": [1, 2]}, None, [0]),
    ],
)
def test_which_steps_fit(fields, size, taps):
    fields = {name: np.array(values) for name, values in fields.items()}
    lens = fields.get("chunk_lens", np.array([], dtype=np.int64))
    table = RequestTable(6, 4, 16, 99, torch.device("cpu"))
    graphs = TokenGraphs(type("Runner", (), {"table": table, "apart": taps})(), token_sizes(8, 160), 96)
    step = Step(chunk_rows=np.arange(len(lens)), token_ids_T=np.zeros(lens.sum(), dtype=np.int64), **fields)
    assert graphs.shape(step) == size


def test_sizes_end_with_the_largest_step_that_may_be():
    assert token_sizes(256, 8192) == list(TOKEN_ROWS)
    assert token_sizes(256, 100)[-2:] == [96, 100]
    assert token_sizes(1, 8192)[-1] == 16 and token_sizes(1, 8192)[:4] == [2, 3, 4, 5]


def draft_on_device(llm, drafter=None):
    """Let the device make drafts from now on, by the engine's drafter or by another one; its steps are graphs."""
    speculation = llm.engine.state.decoding
    assert rank.draft_on_device(llm.engine.executor, drafter or speculation._drafter, "drafter 'it'")
    speculation.device = DeviceDrafting()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[{}], [*[{}] * 9, {"logprobs": 1}]], ids=["plain", "some with scores"])
@pytest.mark.parametrize("drafter", ["suffix", "ngram"])
def test_drafts_of_the_device_change_no_token(monkeypatch, worded, drafter, asked):
    prompts = [[(index + place % 5) % 250 for place in range(9 + 3 * index)] for index in range(20)]
    params = [
        SamplingParams(max_tokens=20 + 2 * index, ignore_eos=True, temperature=index % 2, seed=index, **more)
        for index, more in zip(range(20), cycle(asked), strict=False)
    ]
    engine = {**SIZES, "max_model_len": 160, "overlap": True}
    with LLM(worded, device="cpu", dtype="float32", engine=engine) as llm:
        plain = [answer(output, partial(pytest.approx, abs=1e-5)) for output in llm.generate(prompts, params)]
    with LLM(worded, device="cpu", dtype="float32", drafter=drafter, engine=engine) as llm:
        replay_steps(llm, monkeypatch, 160)
        draft_on_device(llm)
        launched = note_launches(llm, monkeypatch)
        outputs = llm.generate(prompts, params)
        counts = llm.engine.speculation
    assert [answer(output) for output in outputs] == plain
    assert counts.num_kept > 10
    assert sum(len(step.drafting_rows) > 0 for step in launched) > 10


def note_launches(llm, monkeypatch):
    """The steps that are launched from now on."""
    worker, steps = llm.engine.executor, []
    launch = worker.launch
    monkeypatch.setattr(worker, "launch", lambda step: steps.append(step) or launch(step))
    return steps


class Failing(Synthetic):
    """Fails on the device in one way after the other, once it `fails`."""

    count, fails = 0, False

    def __init__(self, spec):
        super().__init__(SyntheticConfig(), spec)
        self.pretended_length = None

    def propose_on_device(self, tokens_RL, rows_B, lengths_B, num_drafts):
        self.count += self.fails
        if self.count % 4 == 1 or not self.fails:
            return super().propose_on_device(tokens_RL, rows_B, lengths_B, num_drafts) + self._vocab_size // 2
        if self.count % 4 == 2:
            raise RuntimeError("no idea")
        return [None, torch.zeros(len(rows_B), num_drafts)][self.count % 4 // 3]


@pytest.mark.slow
def test_a_drafter_that_fails_on_the_device_is_named_once_and_changes_no_token(monkeypatch, worded, caplog):
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3)
    prompts, engine = [[1, 2, 3], [4, 5], [6]], {**SIZES, "overlap": True}
    with LLM(worded, device="cpu", dtype="float32", engine=engine) as llm:
        plain = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM(
        worded, device="cpu", dtype="float32", drafter={"name": "random", "adaptive": False}, engine=engine
    ) as llm:
        replay_steps(llm, monkeypatch)
        spec = DrafterSpec(llm.engine.executor.runner.vocab_size, 8, 96)
        drafter = Failing(spec)
        draft_on_device(llm, drafter)
        drafter.fails = True
        assert [output.token_ids for output in llm.generate(prompts, params)] == plain
        assert llm.engine.speculation.num_drafted > 10
        told = [one.getMessage() for one in caplog.records if "go on without its drafts" in one.getMessage()]
        assert not rank.draft_on_device(llm.engine.executor, drafter, "drafter 'it'"), (
            "it fails while the engine starts"
        )
    assert len(told) == 1 and "drafter 'it'" in told[0] and "propose_on_device" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1.0, 2.25, 5.0])
def test_the_device_keeps_as_many_pretended_drafts_as_stated(monkeypatch, worded, length):
    drafter = {"name": "synthetic", "k": 4, "length": length}
    engine = {**SIZES, "max_num_seqs": 4, "overlap": True}
    with LLM(worded, device="cpu", dtype="float32", drafter=drafter, engine=engine) as llm:
        replay_steps(llm, monkeypatch)
        draft_on_device(llm)
        steps = note_launches(llm, monkeypatch)
        outputs = llm.generate([[1, 2, 3], [4, 5], [6]], SamplingParams(max_tokens=81, ignore_eos=True, seed=3))
        counts = llm.engine.speculation
    assert [len(output.token_ids) for output in outputs] == [81] * 3
    assert sum(counts.kept) / counts.drafted[0] == pytest.approx(length - 1, rel=0.06)
    assert sum(len(step.drafting_rows) > 0 for step in steps) >= len(steps) - 4


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
def test_requests_whose_drafts_of_the_device_are_wrong_pause_if_they_are_to(monkeypatch, worded, adaptive):
    with LLM(
        worded, device="cpu", dtype="float32", drafter={"name": "random", "adaptive": adaptive}, engine=SIZES
    ) as llm:
        replay_steps(llm, monkeypatch)
        drafter = Synthetic(SyntheticConfig(), DrafterSpec(llm.engine.executor.runner.vocab_size, 8, 96))
        drafter.pretended_length = None
        draft_on_device(llm, drafter)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=80, ignore_eos=True))
        counts = llm.engine.speculation
    assert (counts.no_drafts.get("paused", 0) > 50) == adaptive
    assert (counts.num_drafted > 60) != adaptive


@pytest.mark.slow
def test_the_device_makes_no_drafts_where_hidden_states_are_kept_of_each_token(monkeypatch, worded):
    with LLM(worded, device="cpu", dtype="float32", engine={**SIZES, "taps": [0]}) as llm:
        replay_steps(llm, monkeypatch)
        drafter = Synthetic(SyntheticConfig(), DrafterSpec(llm.engine.executor.runner.vocab_size, 8, 96))
        assert not rank.draft_on_device(llm.engine.executor, drafter, "drafter 'it'")
