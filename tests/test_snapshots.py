"""Prefix caching of models with states: requests go on from copies of states at ends of blocks.

Tokens equal those without caching, and what a later turn computes is counted.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hookline import LLM, SamplingParams
from tests.small_models import CONFIGS, save_checkpoint

BLOCK = 4
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENGINE = dict(block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=32)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiny pool": dict(engine=dict(num_blocks=28, max_num_batched_tokens=8)),
    "overlap and tiny pool": dict(engine=dict(num_blocks=28, max_num_batched_tokens=8, overlap=True)),
    "two ranks": dict(tp=2),
    "two stages": dict(pp=2, engine=dict(num_blocks=40)),
}


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 96) for _ in range(count)]


def crowd() -> list[list[int]]:
    """Prompts of mixed lengths, most of which begin alike and part within and between blocks."""
    common = random_tokens(37, 0)
    return [[*common[:length], *random_tokens(9, length)] for length in (0, 8, 18, 20, 32, 33, 37)]


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint({**CONFIGS[request.param], "max_position_embeddings": 8192}, folder, 1)
    yield folder


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), device="cpu", kernels="torch", **{**options, "engine": {**ENGINE, **options.get("engine", {})}}
    )


def check_cache(llm: LLM) -> None:
    llm.engine.state.cache.pool.check()


@pytest.fixture(scope="module")
def two_turns(folder: Path) -> Any:
    """Tokens of a first turn without caching, the prompts of a second turn, and its tokens without caching."""
    with opened(folder, engine=dict(prefix_caching=False)) as llm:
        expected = [output.token_ids for output in llm.generate(crowd(), PARAMS)]
        turns = [[*prompt, *tokens, 7, 8] for prompt, tokens in zip(crowd(), expected, strict=True)]
        return expected, turns, [output.token_ids for output in llm.generate(turns, PARAMS)]


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("way", WAYS)
def test_prefix_hits_change_no_token(folder: Path, two_turns: Any, way: str) -> None:
    expected, turns, expected_turns = two_turns
    with opened(folder, **WAYS[way]) as llm:
        first = llm.generate(crowd(), PARAMS)
        again = llm.generate(crowd(), PARAMS)
        one_by_one = [llm.generate([turn], PARAMS)[0] for turn in turns]
        check_cache(llm)
    assert [output.token_ids for output in first] == expected
    assert [output.token_ids for output in again] == expected
    assert [output.token_ids for output in one_by_one] == expected_turns
    assert sum(output.num_cached_tokens for output in again) > 0
    assert sum(output.num_cached_tokens for output in one_by_one) > 0
    if "tiny pool" in way:
        assert sum(output.num_preemptions for output in [*first, *again]) > 0


@pytest.mark.slow
def test_a_second_turn_computes_only_what_is_new(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine = dict(max_model_len=4096, max_num_batched_tokens=1024, num_blocks=2048)
    prompt = random_tokens(3900, 5)
    with opened(folder, engine=engine) as llm:
        (first,) = llm.generate([prompt], params)
        turn = [*prompt, *first.token_ids, *random_tokens(70, 6)]
        (second,) = llm.generate([turn], params)
    with opened(folder, engine={**engine, "prefix_caching": False}) as llm:
        (alone,) = llm.generate([turn], params)
    assert len(turn) == 4000
    assert second.token_ids == alone.token_ids
    # All but the last token of the first turn were computed; its last full block ends at most a block before.
    assert second.num_cached_tokens == (3900 + 29) // BLOCK * BLOCK


@pytest.mark.slow
def test_prompts_that_part_share_what_they_have_in_common_from_the_third_on(folder: Path) -> None:
    common = random_tokens(41, 7)
    prompts = [[*common, *random_tokens(30, 10 + index)] for index in range(3)]
    with opened(folder, engine=dict(prefix_caching=False)) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, PARAMS)]
    with opened(folder, engine=dict(num_blocks=200, max_num_batched_tokens=128)) as llm:
        outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    assert [output.token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 40]


@pytest.mark.slow
def test_the_memory_of_snapshots_is_stated_and_taken_from_the_caches(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = dict(cpu_cache_gib=0.002)
    with caplog.at_level(logging.INFO, "hookline"), opened(folder, engine=engine) as llm:
        worker: Any = llm.engine.executor
        states, cache = worker.table.states, worker.runner.kv_layers
        slots = states.tensors[len(states.tensors) // 2 :]
        slot_bytes = sum(slot.nbytes for slot in slots)
        cache_bytes = sum(layer.nbytes for layer in cache if layer is not None)
        num_slots = llm.engine.state.cache.snapshots.num_slots
        assert all(slot.shape[1] == num_slots for slot in slots)
    assert f"{num_slots} snapshots of" in caplog.text
    assert slot_bytes + cache_bytes <= 0.002 * 2**30
    assert slot_bytes == num_slots * states.row_bytes
    with opened(folder, engine=dict(cpu_cache_gib=0.002, prefix_caching=False)) as llm:
        assert llm.engine.state.cache.snapshots is None
        worker = llm.engine.executor
        assert not any(slot.nbytes for slot in worker.table.states.tensors[len(slots) :])
