"""What a prompt that is too long is told: which limit it is that it exceeds."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.core.contracts import Limits
from hookline.core.errors import PromptTooLongError
from hookline.core.requests.admission import EngineLimits, admit
from hookline.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"max_position": 32}, ": the checkpoint has at most 32 positions"),
        ({"max_position": 64}, ": raise engine.max_model_len=32"),
        ({}, ": raise engine.max_model_len=32"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_the_limit_that_it_exceeds(limits: dict[str, Any], cause: str) -> None:
    engine = EngineLimits(Limits(4, 64, 32, block_size=16, num_blocks=8), 50, 30.0, **limits)
    with pytest.raises(PromptTooLongError) as refused:
        admit(engine, 0, [1] * 40, SamplingParams())
    assert str(refused.value) == f"the prompt has 40 tokens; a prompt may have at most 31 tokens{cause}"
