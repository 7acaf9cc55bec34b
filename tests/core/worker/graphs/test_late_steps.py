"""Steps whose draws wait for late rows: in two halves as graphs, with what a graph replays computed at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hookline import LLM, SamplingParams, StructuredOutputs
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from hookline.core.worker.runner.model_runner import ALL_LATE, SOME_LATE, Extras
from hookline.core.worker.runner.token_masks import TokenMasks
from tests.replayed_at_once import replay_at_once, with_host_lengths

SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "cpu_cache_gib": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_two_graphs_give_the_tokens_of_an_eager_step(monkeypatch, worded, overlap):
    asked = [StructuredOutputs(regex="[0-9]{3,12}(-[a-z]{2,9})?"), StructuredOutputs(json=True), None]
    params = [
        SamplingParams(
            max_tokens=6 + 2 * index,
            seed=index,
            temperature=index % 4 / 2,
            structured_outputs=asked[index % 3],
            logprobs=1 if index == 5 else None,
            presence_penalty=1.0 if index == 6 else 0.0,
        )
        for index in range(14)
    ]
    prompts = ["x = ", "import os\n"] * 7
    all_masked = [one for one in params if one.structured_outputs is not None]

    def tokens(llm):
        outputs = [*llm.generate(prompts, params), *llm.generate(prompts[: len(all_masked)], all_masked)]
        return [output.token_ids for output in outputs]

    with LLM(worded, device="cpu", dtype="float32", engine={**SIZES, "overlap": overlap}) as llm:
        plain = tokens(llm)
        llm.engine.pool.reset_cache()
        worker = llm.engine.executor
        with_host_lengths(worker.runner.kernels)
        replay_at_once(monkeypatch)
        send = worker.transfer.send  # a copy, as to the host: the next replay may come before these are collected
        worker.transfer.send = lambda tokens_N: send(tokens_N.clone())
        worker.graphs = DecodeGraphs(worker.runner, [1, 2, 4, 8], 128)
        with torch.inference_mode():
            worker.graphs.capture(None)
        assert tokens(llm) == plain
        kinds = {(size, extras.late) for size, extras in worker.graphs._other_draws if extras.late}
        assert {size for size, _ in kinds} >= {4, 8}
        assert {late for _, late in kinds} == {SOME_LATE, ALL_LATE}


def test_a_mask_forbids_what_its_bits_do_not_allow_and_rows_without_one_are_left_alone():
    rng = np.random.default_rng(0)
    masks = TokenMasks(4, 6, PlainKernels(None, None), torch.device("cpu"))
    masks.host_rows[:2] = rng.integers(-(2**31), 2**31, size=(2, 6), dtype=np.int64).astype(np.int32)
    masks.send(2)
    logits_NV = torch.randn(3, 175, generator=torch.Generator().manual_seed(0))
    masks.place(3, torch.tensor([0, 2]))
    found_NV = masks.change(logits_NV)
    for draw, row in ((0, 0), (2, 1)):
        allowed = [bool(masks.host_rows[row, token // 32] >> token % 32 & 1) for token in range(175)]
        assert found_NV[draw].isfinite().tolist() == allowed
        assert torch.equal(found_NV[draw][allowed], logits_NV[draw][allowed])
    assert torch.equal(found_NV[1], logits_NV[1])


def test_rows_of_a_graph_beyond_the_draws_have_no_mask_and_each_draw_has_its_own():
    masks = TokenMasks(4, 6, PlainKernels(None, None), torch.device("cpu"))
    for masked, expected in (([0, 1, 2], [0, 1, 2, 4]), ([1], [4, 0, 4, 4]), ([], [4, 4, 4, 4])):
        for _ in range(2):
            masks.place(3, torch.tensor(masked, dtype=torch.int64))
            assert masks._index_R.tolist() == expected


@pytest.mark.parametrize("late", [SOME_LATE, ALL_LATE])
def test_masks_are_written_anew_only_when_the_graph_that_reads_them_is_over_on_every_rank(late):
    """A rank whose tokens nobody collects cannot tell that by them."""

    class Notes:
        """A graph, and an event behind all that was launched before it was recorded."""

        def __init__(self):
            self.launched, self.awaited = 0, 0

        def replay(self):
            self.launched += 1

        def record(self):
            self.awaited = self.launched

        def synchronize(self):
            assert self.awaited == (self.launched if late == ALL_LATE else 0)

    notes, masks = Notes(), TokenMasks(4, 6, PlainKernels(None, None), torch.device("cpu"))
    masks._sent = notes
    graphs: Any = SimpleNamespace(runner=SimpleNamespace(late_rows=masks))
    draws: Any = SimpleNamespace(graph=notes, results_G=torch.zeros(4))
    for _ in range(2):
        assert masks.host_rows.shape == (4, 6)
        assert len(DecodeGraphs.finish(graphs, draws, Extras(late=late), 2, 2)) == 2
    assert masks.host_rows.shape == (4, 6) and notes.launched == 2


def test_a_step_that_is_not_released_draws_nothing():
    with LLM(device="cpu", engine=SIZES) as llm:
        params = SamplingParams(max_tokens=3, structured_outputs={"regex": "[0-9]{9}"})
        llm.engine.executor.release = lambda handle, num_rows: None
        with pytest.raises(AssertionError, match="draws wait for late rows"):
            llm.generate("x = ", params)
