"""Stages of models whose layers keep unlike things give the tokens of one rank: windows, sinks, experts, states.

Each stage has the blocks' places and the states of its own layers; a stage may lack a kind of layers, or have none with
keys and values. A group starts once and serves many engines.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from hookline import LLM
from hookline.core.assembly.engine import assemble, start_ranks
from hookline.core.assembly.resolve import ResolvedConfig, resolve
from hookline.core.config.settings import validate
from hookline.core.errors import ConfigError
from hookline.core.executor.multiproc import MultiprocExecutor
from hookline.core.plugin.host import PluginHost
from hookline.core.testing.model_suite.driver import ModelDriver
from tests.layered_model import LAYERED_CONFIG, LayeredModel
from tests.small_models import CONFIGS, save_checkpoint
from tests.test_parity import mixed_load
from tests.test_rank_failures import ROOT
from tests.test_ranks import BLOCK_SIZE, ENGINE, SCHEDULERS, Borrowed, observers_of, processing_of, run

KINDS = ["full", 13, "state", "shared:1", "none", 30, 13, "full", "state"]
"""Of a test's model, with every kind of layer."""
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": CONFIGS["gemma3_window"],
    "gpt_oss": CONFIGS["gpt_oss_window"],
    "qwen3_next": CONFIGS["qwen3_next"],
    "layered": {**LAYERED_CONFIG, "layer_kinds": KINDS, "vocab_size": 96, "max_position_embeddings": 256},
}
CUTS = {
    "gemma3_3_1": ("gemma3", 1, [3, 1]),  # the last stage has a window alone
    "gpt_oss_1_2": ("gpt_oss", 1, [1, 2]),
    "qwen3_next_2_1": ("qwen3_next", 1, [2, 1]),  # the last stage has a state alone, and no blocks
    "qwen3_next_1_1_1": ("qwen3_next", 1, [1, 1, 1]),
    "gemma3_tp2_2_2": ("gemma3", 2, [2, 2]),
    "gpt_oss_tp2_2_1": ("gpt_oss", 2, [2, 1]),
    "qwen3_next_tp2_1_2": ("qwen3_next", 2, [1, 2]),
    "layered_5_2_2": ("layered", 1, [5, 2, 2]),
    "layered_tp2_4_5": ("layered", 2, [4, 5]),
}
"""Model, tp, layers of each stage."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked_prompts": dict(max_num_batched_tokens=16),
    "overlapped_preempting": dict(overlap=True),
}
TINY_POOLS = {"gemma3": 34, "gpt_oss": 34, "qwen3_next": 17, "layered": 80}
"""Blocks that hold any of the requests and not all."""
USUAL = [
    ("gemma3_3_1", "overlapped_preempting", "chunked"),
    ("qwen3_next_2_1", "plain", "prefill_first"),
]
CASES = [
    pytest.param(*case, marks=[] if case in USUAL else pytest.mark.nightly)
    for case in itertools.product(CUTS, WAYS, SCHEDULERS)
]


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOKLINE_PLUGINS", "tests.layered")
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def host(plugin: None) -> PluginHost:
    return PluginHost.load()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in MODELS}


def checkpoint(name: str, folder: Path) -> str:
    """A folder with random weights of this model."""
    if not (folder / "config.json").exists():
        if name != "layered":
            save_checkpoint(MODELS[name], folder)
        else:
            (folder / "config.json").write_text(json.dumps(MODELS[name]))
            targets = ModelDriver(LayeredModel, MODELS[name]).targets
            save_file(
                {one: target.view.clone().contiguous() for one, target in targets.items() if target.view is not None},
                folder / "model.safetensors",
            )
    return str(folder)


def tree(name: str, folder: Path, scheduler: str = "prefill_first", tp: int = 1, **engine: Any) -> dict[str, Any]:
    model = {"name": name, "checkpoint": checkpoint(name, folder)}
    options = {"device": "cpu", "scheduler": scheduler, "tp": tp, "engine": {**ENGINE, **engine}}
    return {"model": model, "pp": len(engine.get("pp_layers") or [0]), **options}


@dataclass(frozen=True)
class Started:
    """Ranks, and what they were made of."""

    executor: MultiprocExecutor
    choice: ResolvedConfig
    expected: list[list[int]]


def test_a_cut_that_parts_a_layer_from_the_cache_it_shares_is_refused_before_anything_starts(
    folders: dict[str, Path], host: PluginHost
) -> None:
    options = tree("layered", folders["layered"], pp_layers=[3, 6])
    with pytest.raises(ConfigError, match="layer 3 of the model shares the cache of layer 1, and they are on stages"):
        resolve(validate(options, host), host)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_stage_without_keys_and_values_leaves_the_number_of_blocks_to_the_others(folders: dict[str, Path]) -> None:
    options = tree("qwen3_next", folders["qwen3_next"], pp_layers=[2, 1], cpu_cache_gib=0.001, num_blocks=None)
    with LLM(**options) as llm:
        block = 2 * 2 * 16 * 4 * BLOCK_SIZE  # keys and values of the only such layer, 2 heads of 16 numbers each
        assert llm.engine.num_blocks == int(0.001 * (1 << 30)) // block - 1


ANSWERS: dict[str, list[list[int]]] = {}
"""What one rank says, by model."""


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, folders: dict[str, Path], host: PluginHost) -> Iterator[Started]:
    name, tp, counts = CUTS[request.param]
    if name not in ANSWERS:
        with LLM(**tree(name, folders[name])) as llm:
            ANSWERS[name] = [output.token_ids for output in llm.generate(*mixed_load())]
    choice = resolve(validate(tree(name, folders[name], tp=tp, pp_layers=counts), host), host)
    ranks = start_ranks(choice, processing_of(choice, host))
    assert isinstance(ranks, MultiprocExecutor)
    yield Started(ranks, choice, ANSWERS[name])
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize(("group", "way", "scheduler"), CASES, indirect=["group"], scope="module")
def test_stages_of_unlike_layers_give_the_tokens_of_one_rank(
    group: Started, folders: dict[str, Path], host: PluginHost, scheduler: str, way: str
) -> None:
    asked = group.choice.config
    assert asked.model.entry is not None and asked.engine.pp_layers is not None
    name = asked.model.entry.name
    engine = {**WAYS[way], "pp_layers": list(asked.engine.pp_layers)}
    if "preempting" in way:
        engine["num_blocks"] = TINY_POOLS[name]
    config = validate(tree(name, folders[name], scheduler, asked.tp, **engine), host)
    limits = {one: getattr(config.engine, one) for one in ("max_num_seqs", "max_num_batched_tokens")}
    choice = replace(group.choice, config=config, attention=replace(group.choice.attention, **limits))
    borrowed = Borrowed(group.executor, config.engine.num_blocks)
    served = assemble(choice, observers_of(host), borrowed, processing_of(choice, host))
    outputs = run(served, *mixed_load())
    assert [output.token_ids for output in outputs] == group.expected
    if "preempting" in way:
        assert sum(output.num_preemptions for output in outputs) >= 1
        return
    again = run(served, *mixed_load())
    assert [output.token_ids for output in again] == group.expected
    num_cached = sum(output.num_cached_tokens for output in again)
    assert num_cached >= (1 if choice.groups.has_states else 100)
