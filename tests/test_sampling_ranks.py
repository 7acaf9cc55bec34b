"""Processors and log-probabilities over several ranks: the tokens and scores of one."""

import pytest

from hookline import LLM
from tests.test_logprobs import TOLERANCE, alone, scored_load  # noqa: F401 - a fixture


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_two_ranks_give_the_tokens_and_scores_of_one(folder, alone):  # noqa: F811
    with LLM(
        folder,
        device="cpu",
        tp=2,
        engine=dict(num_blocks=12, block_size=16, max_num_batched_tokens=64, max_num_seqs=16),
    ) as llm:
        outputs = llm.generate(*scored_load())
    assert sum(output.num_preemptions for output in outputs) >= 1
    for output, expected in zip(outputs, alone, strict=True):
        assert output.token_ids == expected.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            for one, other in zip(getattr(output, name) or (), getattr(expected, name) or (), strict=True):
                assert (one is None) == (other is None)
                assert one is None or abs(one.logprob - other.logprob) < TOLERANCE
