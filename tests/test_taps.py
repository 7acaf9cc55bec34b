"""Hidden states behind layers, as observers see them: equal to transformers', and named by request and position."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hookline import LLM, PoolingParams, SamplingParams
from hookline.core.contracts import API_VERSION, TappedStates
from hookline.core.errors import ConfigError, PluginError
from tests.core.worker.graphs.test_token_graphs import SIZES, replay_steps
from tests.hf_models import make_qwen3
from tests.test_pooling_parity import MAX_DIFFERENCE, random_prompts

PROMPTS = random_prompts()
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, make_qwen3(folder, num_hidden_layers=3)


PLUGIN = f"""
from hookline.core.contracts import hookimpl

API_VERSION = {API_VERSION}
found = []


@hookimpl
def on_hidden_states(states):
    found.append(states)
"""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[TappedStates]]:
    """What a plugin of this process is shown; the processes of other ranks have it, too."""
    (tmp_path / "seeing_states.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HOOKLINE_PLUGINS", "seeing_states")
    yield importlib.import_module("seeing_states").found
    del sys.modules["seeing_states"]


@torch.no_grad()
def expected_states(model: Any, tokens: list[int], layer: int) -> np.ndarray:
    """What a forward hook of transformers' layer sees."""
    kept: list[Any] = []
    hook = model.model.layers[layer].register_forward_hook(lambda module, args, output: kept.append(output))
    model(torch.tensor([tokens]))
    hook.remove()
    output = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    return output.reshape(len(tokens), -1).numpy()


def by_request(seen: list[TappedStates], layer: int) -> dict[int, dict[int, np.ndarray]]:
    """Each request's states by position; what was computed twice must be the same."""
    found: dict[int, dict[int, np.ndarray]] = {}
    for states in seen:
        assert list(states.layers) == [0, 2]
        for id_, position, row in zip(states.request_ids_T, states.positions_T, states.layers[layer], strict=True):
            rows = found.setdefault(int(id_), {})
            assert position not in rows or np.abs(rows[position] - row).max() <= MAX_DIFFERENCE
            rows[int(position)] = row
    return found


WAYS = {
    "plain": dict(),
    "overlap_tiny_pool": dict(engine=dict(overlap=True, num_blocks=9, block_size=16), scheduler="chunked"),
    "two_ranks": dict(tp=2),
    "two_stages": dict(pp=2, engine=dict(max_num_batched_tokens=32, max_num_seqs=8)),
    "three_stages": dict(pp=3, tp=2, engine=dict(max_num_batched_tokens=32, max_num_seqs=8)),
}
CASES = [
    pytest.param(options, id=way, marks=pytest.mark.nightly if way == "three_stages" else [])
    for way, options in WAYS.items()
]


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("options", CASES)
def test_states_equal_transformers_for_every_token(options: Any, checkpoint: Any, seen: list[TappedStates]) -> None:
    folder, model = checkpoint
    with LLM(str(folder), device="cpu", **options) as llm:
        plain = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert seen == []  # nothing is asked for
    engine = {**options.get("engine", {}), "taps": [0, 2], "prefix_caching": False}
    with LLM(str(folder), device="cpu", **{**options, "engine": engine}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        vector = llm.embed(PROMPTS[0], PoolingParams("last"))[0]
    assert [output.token_ids for output in outputs] == plain
    assert vector.error is None
    for layer in (0, 2):
        found = by_request(seen, layer)
        for output in outputs:
            tokens = [*output.prompt_token_ids, *output.token_ids[:-1]]
            rows = found[output.request_id]
            assert set(range(len(tokens))) <= set(rows) <= set(range(len(tokens) + 1))  # with overlap, one too many
            states_TD = np.stack([rows[position] for position in range(len(tokens))])
            assert np.abs(states_TD - expected_states(model, tokens, layer)).max() <= MAX_DIFFERENCE
        assert sorted(found[vector.request_id]) == [*range(len(PROMPTS[0]))]


def test_replayed_decodes_show_the_states_of_eager_ones(
    checkpoint: Any, seen: list[TappedStates], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, shown = [], []
    for is_replayed in (False, True):
        with LLM(str(checkpoint[0]), device="cpu", engine={**SIZES, "taps": [0, 2], "prefix_caching": False}) as llm:
            graphs = replay_steps(llm, monkeypatch)[1] if is_replayed else []
            outputs = llm.generate(PROMPTS, GREEDY)
        answers.append([output.token_ids for output in outputs])
        shown.append([by_request(seen, layer) for layer in (0, 2)])
        seen.clear()
    assert answers[0] == answers[1]
    assert sum(graph.count > 1 for graph in graphs) > 2  # as decodes, which have no graphs of their own then
    for plain, replayed in zip(*shown, strict=True):
        assert plain.keys() == replayed.keys()
        for id_, rows in plain.items():
            assert rows.keys() == replayed[id_].keys()
            assert max(np.abs(row - replayed[id_][position]).max() for position, row in rows.items()) <= MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([3], "engine.taps names layer 3; this model's layers are 0 to 2"),
        ([-1], "must be different layers, from 0"),
        ([1, 1], "must be different layers, from 0"),
    ],
)
def test_layers_that_are_not_there_are_refused_before_anything_is_loaded(
    taps: list[int], message: str, checkpoint: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint[0]), device="cpu", engine={"taps": taps})


def test_a_model_that_shows_no_layers_is_named(
    checkpoint: Any, seen: list[TappedStates], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hookline.plugins.models import qwen3

    monkeypatch.setattr(qwen3, "tapped", lambda layers, residual, attend: layers)
    with pytest.raises(
        PluginError, match=r"engine.taps, or the drafter, asks for layers \[1\], which the model does not show"
    ):
        with LLM(str(checkpoint[0]), device="cpu", engine={"taps": [1]}) as llm:
            llm.generate(PROMPTS[:1], GREEDY)
