"""The one-pass sampler draws what the plain one draws: under the interpreter on a CPU, and for real on a GPU."""

import math
import os

import pytest
import torch

from hookline.core.contracts import NO_TOKEN, SamplingBatch
from hookline.plugins.samplers import GumbelConfig
from hookline.plugins.samplers.gumbel import Gumbel, log_exponential, random_bits

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(scope="module")
def best_tokens():
    pytest.importorskip("triton")
    if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    from hookline.plugins.samplers.gumbel_triton import best_tokens

    return best_tokens


@pytest.mark.parametrize("vocab", [7, 4096, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_draws_the_same_tokens_as_the_plain_version(best_tokens, vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    num_rows = 12
    logits_NV = (torch.randn(num_rows, vocab, generator=generator) * 3).to(dtype)
    seed_N = torch.randint(0, 2**63 - 1, (num_rows,), generator=generator)
    temperature_N = torch.tensor([0.0, 0.6, 1.0, 2.0] * 3)
    params = SamplingBatch(temperature_N, seed_N, torch.arange(num_rows) * 1000)
    plain = Gumbel(GumbelConfig())
    plain.fused = None
    scores_N, tokens_N = plain.sample_shard(logits_NV, params, 100)
    arguments = (x.to(DEVICE) for x in (logits_NV, temperature_N, seed_N, params.position_N))
    fused_scores_N, fused_tokens_N = best_tokens(*arguments, 100, False)
    assert fused_tokens_N.cpu().tolist() == tokens_N.tolist()
    # Two logarithms in float32, each within an ulp or two of the other's.
    torch.testing.assert_close(fused_scores_N.cpu(), scores_N, atol=2e-5, rtol=2e-5)


def test_tokens_whose_bounds_stand_in_the_wrong_order_are_told_apart(best_tokens):
    """Eight tokens of one lane, with keys for which the one with the highest bound does not win."""
    logits_V, seed_N = torch.linspace(-1, 1, 8), torch.arange(20_000)
    random_NV = random_bits(seed_N, torch.zeros_like(seed_N), 8, 0).float() + 0.5
    log2_NV = random_NV.view(torch.int32).double() / 2**23 - 127
    scores_NV = logits_V - log_exponential(seed_N, torch.zeros_like(seed_N), 8, 0)
    winner_N = scores_NV.argmax(1)
    other_N = (logits_V - math.log(2) * log2_NV).argmax(1)
    margin_N = (scores_NV.gather(1, winner_N[:, None]) - scores_NV.gather(1, other_N[:, None])).squeeze(1)
    chosen = torch.nonzero(margin_N > 1e-3).squeeze(1)[:8]
    assert len(chosen) == 8
    arguments = (logits_V.expand(8, 8), torch.ones(8), seed_N[chosen], torch.zeros_like(chosen))
    tokens_N = best_tokens(*(x.contiguous().to(DEVICE) for x in arguments), 0, False)[1]
    assert tokens_N.cpu().tolist() == winner_N[chosen].tolist()


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 100.0])
def test_extreme_temperatures_draw_as_the_plain_version(best_tokens, temperature):
    logits_NV = torch.randn(4, 5000, generator=torch.Generator().manual_seed(2)) * 5
    logits_NV[:, ::3] = -torch.inf
    seed_N, position_N = torch.arange(4), torch.arange(4) + 9
    params = SamplingBatch(torch.full((4,), temperature), seed_N, position_N)
    plain = Gumbel(GumbelConfig())
    plain.fused = None
    arguments = (x.to(DEVICE) for x in (logits_NV, params.temperature_N, seed_N, position_N))
    assert best_tokens(*arguments, 0, False)[1].cpu().tolist() == plain.sample(logits_NV, params).tolist()


@pytest.mark.parametrize("allowed", [[], [0], [9000, 9007], [4095, 4096, 12287]])
def test_where_nearly_all_tokens_are_forbidden_the_plain_version_draws_the_same(best_tokens, allowed):
    logits_NV = torch.full((3, 12288), -torch.inf)
    logits_NV[:, allowed] = 1.0
    seed_N, position_N, temperature_N = torch.arange(3), torch.arange(3) + 9, torch.tensor([0.0, 0.7, 1.0])
    plain = Gumbel(GumbelConfig())
    plain.fused = None
    expected = plain.sample(logits_NV, SamplingBatch(temperature_N, seed_N, position_N)).tolist()
    arguments = (x.to(DEVICE) for x in (logits_NV, temperature_N, seed_N, position_N))
    assert best_tokens(*arguments, 0, False)[1].cpu().tolist() == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN under the interpreter
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("vocab", [7, 4096, 5000])
def test_a_row_of_nan_draws_no_token_and_others_draw_what_they_would(best_tokens, vocab, greedy):
    logits_NV = torch.randn(6, vocab + 3, generator=torch.Generator().manual_seed(vocab)).to(torch.bfloat16)
    logits_NV = logits_NV.to(DEVICE)[:, :vocab]
    others = [torch.tensor([0.0, 1.0] * 3), torch.arange(6), torch.arange(6)]
    arguments = [logits_NV, *(x.to(DEVICE) for x in others), 100, greedy]
    before_N = best_tokens(*arguments)[1]
    logits_NV[1:4] = torch.nan
    logits_NV[3, : vocab - 2] = -torch.inf  # as a grammar leaves it
    logits_NV[4] = -torch.inf  # a row that is forbidden as a whole has no NaN, and any token will do
    scores_N, tokens_N = best_tokens(*arguments)
    assert tokens_N[1:4].tolist() == [NO_TOKEN] * 3 and bool(scores_N[1:4].isnan().all())
    assert 100 <= tokens_N[4] < 100 + vocab and scores_N[4] == -torch.inf
    assert tokens_N[[0, 5]].equal(before_N[[0, 5]])


def test_greedy_ignores_temperature_and_takes_the_first_of_equals(best_tokens):
    logits_NV = torch.zeros(2, 50, device=DEVICE)
    logits_NV[1, 30] = logits_NV[1, 40] = 5.0
    ones_N, zeros_N = torch.ones(2, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert best_tokens(logits_NV, ones_N, zeros_N, zeros_N, 0, True)[1].tolist() == [0, 30]


def test_the_noise_reaches_far_into_the_upper_tail():
    noise_NV = -log_exponential(torch.arange(64), torch.arange(64), 65536, 0)
    assert noise_NV.isfinite().all()
    # The largest of n standard Gumbel variates lies near log(n), give or take a few.
    assert 13 < noise_NV.max() < 25
