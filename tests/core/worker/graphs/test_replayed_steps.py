"""Engines whose steps are graphs, replayed without a GPU: requests get what they get without graphs, whatever they ask
for, and no graph reads what another one has written over.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import LLM, SamplingParams, StructuredOutputs
from hookline.core.step.captured import joining, prompt_shapes
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from hookline.core.worker.graphs.prompt_graphs import PromptGraphs
from hookline.core.worker.runner.model_runner import Extras
from tests.batch_invariance import Load, decodes_that_joined, launches_of, one_after_the_other
from tests.replayed_at_once import replay_at_once, with_host_lengths

MORE: list[dict[str, Any]] = [
    {"top_k": 20, "top_p": 0.9},
    {},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1, "logprobs": 3},
    {"min_p": 0.05, "logit_bias": {7: 2.0}},
    {"bad_words": ((3,), (4, 5)), "allowed_token_ids": tuple(range(0, 250, 2))},
    {"logprobs": 0},
    {"min_tokens": 5, "stop_token_ids": tuple(range(0, 4096, 2))},
]
FORMS: list[dict[str, Any]] = [{"structured_outputs": StructuredOutputs(regex="[0-9]{3,12}(-[a-z]{2,9})?")}]
PREPARED = [Extras(16), Extras(16, 0)]


def answer(output, about=float):
    """An answer's tokens, and those with scores."""
    assert output.error is None, output.error
    return output.token_ids, [(one.token_id, about(one.logprob)) for one in output.logprobs or ()]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("scheduler", "tokens", "asked"),
    [("prefill_first", 2048, MORE), ("prefill_first", 2048, MORE + FORMS), ("chunked", 48, MORE + FORMS)],
    ids=["joined", "with forms", "mixed"],
)
def test_graphs_give_what_eager_steps_give(monkeypatch, worded, scheduler, tokens, asked, overlap):
    sizes = dict(max_num_batched_tokens=tokens, max_num_seqs=20, max_model_len=96, block_size=16, num_blocks=60)
    prompts = [[(7 * index + place) % 250 for place in range(3 + 11 * index % 60)] for index in range(60)]
    params = [
        SamplingParams(max_tokens=6 + index % 25, ignore_eos=True, temperature=index % 3, seed=index, **more)
        for index, more in zip(range(60), cycle(asked), strict=False)
    ]
    engine = {**sizes, "overlap": overlap}
    with LLM(worded, device="cpu", dtype="float32", scheduler=scheduler, engine=engine) as llm:
        plain = [answer(output, partial(pytest.approx, abs=1e-5)) for output in llm.generate(prompts, params)]
        llm.engine.pool.reset_cache()
        graphs = replay_steps(llm, monkeypatch, prompt_shapes(20, tokens, 96, joined_decodes=128))
        launched = launches_of(llm.engine.executor.prompt_graphs)
        outputs = one_after_the_other(llm, Load(prompts, params))
        assert [answer(output) for output in outputs] == plain
        assert sum(graph.count > 1 for graph in graphs) > 10
        if asked == MORE:
            assert len(decodes_that_joined(launched)) > 5
        steps = [step for step, _ in launched]
        assert len({step.extensions for step in steps}) > 2 and max(step.num_logprobs for step in steps) > 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("asked", [MORE, MORE + FORMS], ids=["without forms", "with forms"])
def test_rows_that_share_a_prefix_get_the_same(monkeypatch, worded, asked, overlap):
    sizes = dict(max_num_batched_tokens=2048, max_num_seqs=20, max_model_len=160, block_size=16, num_blocks=300)
    common = [(5 * place) % 250 for place in range(96)]
    prompts = [[*common, *((7 * index + place) % 250 for place in range(3 + index % 9))] for index in range(30)]
    params = [
        SamplingParams(max_tokens=6 + index % 25, ignore_eos=True, temperature=index % 3, seed=index, **more)
        for index, more in zip(range(30), cycle(asked), strict=False)
    ]
    with LLM(worded, device="cpu", dtype="float32", engine={**sizes, "overlap": overlap}) as llm:
        plain = [answer(output, partial(pytest.approx, abs=1e-5)) for output in llm.generate(prompts, params)]
        llm.engine.pool.reset_cache()
        replay_steps(llm, monkeypatch, [], max_len=160)
        monkeypatch.setattr("hookline.core.kv_cache.shared_prefix.MIN_SAVED_TOKENS", 100)
        llm.engine.dispatcher.writer.shares_prefixes = True
        shared = [layers.graphs[True] for layers in llm.engine.executor.graphs._layers.values()]
        before = sum(graph.count for graph in shared)
        assert [answer(output) for output in llm.generate(prompts, params)] == plain
        assert sum(graph.count for graph in shared) > before + 20


def replay_steps(llm, monkeypatch, shapes, max_len=96):
    """From now on the engine's steps are graphs, of which this is the list."""
    worker = llm.engine.executor
    graphs = replay_at_once(monkeypatch)
    with_host_lengths(worker.runner.kernels)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    send = worker.transfer.send  # a copy, as to the host: the next replay may come before these are collected
    worker.transfer.send = lambda tokens_N: send(tokens_N.clone())
    worker.graphs = DecodeGraphs(worker.runner, [1, 2, 4, 8, 16, 20], max_len, shares_prefixes=True)
    worker.prompt_graphs = PromptGraphs(worker.runner, shapes, max_len)
    with torch.inference_mode():
        worker.prompt_graphs.capture(None)
        worker.graphs.capture(None, PREPARED)
    plan = replace(llm.engine.limits.plan, joining=joining(shapes))
    llm.engine.state.limits = replace(llm.engine.limits, plan=plan)
    return graphs
