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
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 16,
    "chunk_size": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ENGINE = {"block_size": 4, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 8}
"""Prompts of up to 40 tokens, in chunks of 8 at most."""


def prompts() -> list[list[int]]:
    """The last shares a prefix with the third."""
    rng = random.Random(0)
    own = [[rng.randrange(96) for _ in range(length)] for length in (1, 7, 40, 23)]
    return [*own, [*own[2][:32], 5]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder, and what transformers says to each prompt."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    model: Any = Mamba2ForCausalLM(Mamba2Config(**CONFIG))
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.5))
    folder = tmp_path_factory.mktemp("mamba2")
    model.save_pretrained(folder)
    return folder, [greedy(model, prompt) for prompt in prompts()]


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The next NUM_TOKENS tokens of transformers."""
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
    continued: list[int] = tokens[0, len(prompt) :].tolist()
    return continued


def test_chunks_and_preemptions_change_no_token_and_model_auto_takes_it(
    checkpoint: tuple[Path, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = checkpoint
    engine = {**ENGINE, "num_blocks": 18}
    with (
        caplog.at_level(logging.INFO, "hookline"),
        LLM(str(folder), device="cpu", dtype="float32", kernels="torch", engine=engine) as llm,
    ):
        outputs = llm.generate(prompts(), PARAMS)
        again = [llm.generate(prompts()[-1:], PARAMS)[0] for _ in range(2)]
    assert "model=auto takes 'mamba2': it claims Mamba2ForCausalLM" in caplog.text
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in again] == [expected[-1]] * 2
    assert again[1].num_cached_tokens == 32, "all full blocks before the last token"
    assert len({token for tokens in expected for token in tokens}) > 20, "a degenerate model shows nothing"


def test_two_ranks_change_no_token(checkpoint: tuple[Path, list[list[int]]]) -> None:
    folder, expected = checkpoint
    with LLM(str(folder), device="cpu", dtype="float32", kernels="torch", tp=2, engine=ENGINE) as llm:
        assert [output.token_ids for output in llm.generate(prompts(), PARAMS)] == expected
