"""What plugins return in a step is held against their contracts: shards, scores and routes."""

from types import SimpleNamespace

import pytest
import torch

from hookline.core.errors import StepFault
from hookline.core.layers import SoftmaxRouter, plain_route_experts
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.worker.runner.model_runner import ModelRunner, scored
from hookline.core.worker.step_checks import StepChecks

CHECKS = StepChecks({"sampler": "sampler 'theirs'", "kernels": "kernels 'theirs'"})
LOGITS_NV = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
SCORES_N, TOKENS_N = LOGITS_NV.max(1).values, LOGITS_NV.argmax(1) + 40


def drawn(sample_shard):
    """What a runner makes of a sampler's shard: the second of two ranks, with tokens 40 to 79."""
    runner = SimpleNamespace(is_checking=True, checks=CHECKS, sampler=SimpleNamespace(sample_shard=sample_shard))
    return ModelRunner._draw_shard(runner, LOGITS_NV.clone(), None, 40)


def test_a_shard_that_keeps_its_contract_is_handed_on():
    scores_N, tokens_N = drawn(lambda *_: (SCORES_N, TOKENS_N))
    assert torch.equal(scores_N, SCORES_N) and torch.equal(tokens_N, TOKENS_N)


@pytest.mark.parametrize(
    ("sample_shard", "message"),
    [
        (lambda *_: SCORES_N, "it returned shape (3,) of float32, not 2 tensors"),
        (lambda *_: (SCORES_N.double(), TOKENS_N), "of float64, not shape (3,) of float32"),
        (lambda *_: (SCORES_N, TOKENS_N[:2]), "it returned shape (2,) of int64, not shape (3,) of int64"),
        (lambda *_: (SCORES_N, TOKENS_N - 40), "which is outside the shard (40 to 79)"),
        (lambda *_: (SCORES_N * torch.nan, TOKENS_N), "a score is NaN"),
        (lambda logits_NV, *_: (logits_NV.zero_(), (SCORES_N, TOKENS_N))[1], "it wrote to the logits"),
    ],
)
def test_a_shard_that_breaks_its_contract_is_named(sample_shard, message):
    with pytest.raises(StepFault) as caught:
        drawn(sample_shard)
    assert str(caught.value).startswith("sampler 'theirs' breaks its contract in sample_shard: ")
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_scores_as_core_s_own_are_accepted(num_logprobs):
    tokens_N = TOKENS_N - 40
    CHECKS.scores(scored(LOGITS_NV, tokens_N, num_logprobs), tokens_N, num_logprobs, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[:, :5], "it returned shape (3, 5) of int64, not shape (3, 6) of int64"),
        (lambda found: found.int(), "of int32, not shape (3, 6) of int64"),
        (lambda found: found + 1, "its first column is not the tokens that it was given"),
        (lambda found: found * torch.tensor([1, 1, 100, 1, 1, 1]), "which is outside the vocabulary (0 to 39)"),
    ],
)
def test_scores_that_break_their_contract_are_named(change, message):
    tokens_N = TOKENS_N - 40
    with pytest.raises(StepFault, match="sampler 'theirs' breaks its contract in score: ") as caught:
        CHECKS.scores(change(scored(LOGITS_NV, tokens_N, 2)), tokens_N, 2, 40)
    assert str(caught.value).endswith(message)


class Routes(PlainKernels):
    """Kernels that route as a test says."""

    change = staticmethod(lambda expert_TA, weight_TA: (expert_TA, weight_TA))

    def route_experts(self, logits_TX, top_k, normalise):
        return self.change(*plain_route_experts(logits_TX, top_k, normalise))


def routed(change):
    """A router's choice of 2 of 6 experts for 3 tokens, made before anybody checks."""
    kernels = Routes.__new__(Routes)
    runtime = SimpleNamespace(kernels=kernels, dtype=torch.float32, device=torch.device("cpu"))
    router = SoftmaxRouter(6, 8, 2, runtime, normalise=True)
    torch.nn.init.normal_(router.weight_XD)
    kernels.change = change
    with CHECKS.kernels(kernels):
        return router(torch.randn(3, 8))


def test_a_route_that_keeps_its_contract_is_handed_on():
    assert [part.shape for part in routed(lambda expert_TA, weight_TA: (expert_TA, weight_TA))] == [(3, 2), (3, 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda expert_TA, weight_TA: expert_TA, "it returned shape (3, 2) of int64, not 2 tensors"),
        (lambda expert_TA, weight_TA: (expert_TA.int(), weight_TA), "of int32, not shape (3, 2) of int64"),
        (lambda expert_TA, weight_TA: (expert_TA, weight_TA.double()), "of float64, not shape (3, 2) of float32"),
        (lambda expert_TA, weight_TA: (expert_TA[:, :1], weight_TA), "of int64, not shape (3, 2) of int64"),
        (lambda expert_TA, weight_TA: (expert_TA + 6, weight_TA), "which is outside the experts (0 to 5)"),
    ],
)
def test_a_route_that_breaks_its_contract_is_named(change, message):
    with pytest.raises(StepFault, match="kernels 'theirs' breaks its contract in route_experts: ") as caught:
        routed(change)
    assert str(caught.value).endswith(message)
