"""From end to end: greedy tokens equal those of transformers' generate, on a small random checkpoint in float32."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import LLM, SamplingParams

CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": 13,
    "rope_theta": 500_000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "pad_token_id": 0,
    "eos_token_id": 3,
    "initializer_range": 0.3,
}
NUM_TOKENS = 40
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ENGINE = {"block_size": 4, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 8}
"""Prompts of up to 40 tokens, in chunks of 8 at most."""


def prompts() -> list[list[int]]:
    """Shorter and longer than the window; the last two share a prefix with the third."""
    rng = random.Random(0)
    own = [[rng.randrange(96) for _ in range(length)] for length in (1, 7, 40, 23)]
    return [*own, [*own[2][:32], 5], [*own[2][:36], 6, 7]]


def save(folder: Path, window: int) -> list[list[int]]:
    """Save a random checkpoint, and return what transformers says to each prompt."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    torch.manual_seed(0)
    config = Olmo3Config(**{**CONFIG, "rope_parameters": None, "sliding_window": window})
    model: Any = Olmo3ForCausalLM(config)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of one would hide each other
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return [greedy(model, prompt) for prompt in prompts()]


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The next NUM_TOKENS tokens of transformers."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)  # else it takes token 0 for padding
    model.generation_config.eos_token_id = None
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    continued: list[int] = tokens[0, len(prompt) :].tolist()
    return continued


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder, whose window is shorter than some of the prompts, and transformers' tokens."""
    folder = tmp_path_factory.mktemp("olmo3")
    return folder, save(folder, 13)


def test_chunks_and_preemptions_change_no_token_and_model_auto_takes_it(
    checkpoint: tuple[Path, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = checkpoint
    with (
        caplog.at_level(logging.INFO, "hookline"),
        LLM(str(folder), device="cpu", kernels="torch", engine={**ENGINE, "num_blocks": 60}) as llm,
    ):
        outputs = llm.generate(prompts(), PARAMS)
    assert "model=auto takes 'olmo3': it claims Olmo3ForCausalLM" in caplog.text
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.num_preemptions for output in outputs) > 0
    assert len({token for tokens in expected for token in tokens}) > 20, "a degenerate model shows nothing"


def test_a_window_longer_than_every_prompt_changes_no_token(tmp_path: Path) -> None:
    expected = save(tmp_path, 60)
    with LLM(str(tmp_path), device="cpu", kernels="torch", engine={**ENGINE, "num_blocks": 400}) as llm:
        assert [output.token_ids for output in llm.generate(prompts(), PARAMS)] == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_prefix_hits_behind_a_window_change_no_token_on_one_rank_and_on_two(
    ranks: int, checkpoint: tuple[Path, list[list[int]]]
) -> None:
    folder, expected = checkpoint
    with LLM(str(folder), device="cpu", kernels="torch", tp=ranks, engine={**ENGINE, "num_blocks": 400}) as llm:
        first = llm.generate(prompts()[2:4], PARAMS)
        then = llm.generate([*prompts()[2:3], *prompts()[4:]], PARAMS)
    assert [output.token_ids for output in first] == expected[2:4]
    assert [output.token_ids for output in then] == [expected[2], *expected[4:]]
    assert all(output.num_cached_tokens >= 28 for output in then), "each shares at least 32 tokens with the first"
