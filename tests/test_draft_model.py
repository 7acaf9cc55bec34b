"""drafter=draft_model: a model drafts for another one, with the seeds of its requests; no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookline import LLM, SamplingParams
from hookline.core.contracts import DraftCounts
from hookline.core.errors import ConfigError
from tests.doc_pages import ROOT
from tests.small_models import CONFIGS, save_checkpoint

BUNDLED = ROOT / "plugins/models/qwen3_tiny"
PROMPTS: list[Any] = ["def f(x):\n    return", "The cat sat on", "a", "one two three one"]
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=24, **more)
    for seed, (temperature, more) in enumerate([(0.0, {}), (1.0, {}), (0.7, {"top_p": 0.8}), (1.0, {"n": 2})])
]


def drafted_by(drafter: dict[str, Any] | None, **engine: Any) -> tuple[list[Any], DraftCounts]:
    """Tokens of all completions, and what drafts came to."""
    options: dict[str, Any] = {} if drafter is None else {"drafter": {"name": "draft_model", **drafter}}
    with LLM(
        device="cpu", dtype="float32", engine={"max_model_len": 128, "max_num_seqs": 8, **engine}, **options
    ) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        tokens = [one.token_ids for output in outputs for one in output.completions]
        return tokens, llm.engine.speculation or DraftCounts()


@pytest.mark.slow
def test_the_model_itself_drafts_what_is_drawn_greedy_and_sampled() -> None:
    expected, _ = drafted_by(None)
    tokens, counts = drafted_by({"checkpoint": str(BUNDLED)})
    assert tokens == expected
    assert counts.num_drafted > 60
    assert counts.num_kept > 0.9 * counts.num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"num_blocks": 24, "block_size": 8, "max_num_seqs": 4, "max_model_len": 80}])
def test_another_model_changes_no_token(engine: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint({**CONFIGS["llama"], "vocab_size": 4096}, tmp_path)
    expected, _ = drafted_by(None, **engine)
    tokens, counts = drafted_by({"checkpoint": str(tmp_path), "adaptive": False}, **engine)
    assert tokens == expected
    assert counts.num_drafted > 60 and counts.num_kept < 0.2 * counts.num_drafted


@pytest.mark.slow
def test_a_model_that_does_not_know_the_tokens_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint({**CONFIGS["llama"], "vocab_size": 300}, tmp_path)
    expected, _ = drafted_by(None)
    tokens, counts = drafted_by({"checkpoint": str(tmp_path)})
    assert tokens == expected and not counts.num_drafted
    told = [record.getMessage() for record in caplog.records if "drafter=draft_model" in record.getMessage()]
    assert len(told) == 1 and "its model refuses a request" in told[0] and "token" in told[0], told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, r"drafter=draft_model needs drafter\.checkpoint=FOLDER or HUB_ID, or drafter\.model=PRESET"),
        ({"checkpoint": "/nowhere"}, r"drafter=draft_model cannot start its model: .*/nowhere"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        drafted_by(fields)
