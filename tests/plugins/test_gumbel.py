"""Gumbel-max against the conformance suite, and its distribution for many sizes of the vocabulary V."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hookline.core.contracts import NO_TOKEN, SamplingBatch
from hookline.core.testing.sampler_suite import LEAST_P_VALUE, SamplerSuite
from hookline.core.testing.sampler_suite.counts import chi_square_p_value
from hookline.plugins.samplers import GumbelConfig
from hookline.plugins.samplers.gumbel import Gumbel, log_exponential, random_bits

ROWS_AT_ONCE = 1024


class TestGumbel(SamplerSuite):
    sizes_alike = True

    def make(self) -> Gumbel:
        return Gumbel(GumbelConfig())


@pytest.mark.parametrize(("vocab_size", "num_draws"), [(8, 32768), (100, 16384), (1000, 8192), (4096, 4096)])
@pytest.mark.parametrize("temperature", [0.5, 1.2])
def test_draws_follow_the_softmax_at_every_vocabulary_size(vocab_size: int, num_draws: int, temperature: float) -> None:
    logits_V = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for first in range(0, num_draws, ROWS_AT_ONCE):
        tokens_N = draw(logits_V.expand(ROWS_AT_ONCE, -1), temperature, first)
        counts_V += torch.bincount(tokens_N, minlength=vocab_size)
    assert chi_square_p_value(counts_V, (logits_V.double() / temperature).softmax(-1)) > LEAST_P_VALUE


@pytest.mark.slow
def test_draws_far_out_in_a_large_vocabulary_follow_the_softmax() -> None:
    """Of 151,936 tokens three count, and the last of them is the last token."""
    logits_V = torch.full((151_936,), -30.0)
    logits_V[[7, 65_536, 151_935]] = torch.tensor([1.0, 0.0, 0.5])
    tokens_N = torch.cat([draw(logits_V.expand(64, -1), 1.0, first) for first in range(0, 512, 64)])
    assert (
        chi_square_p_value(torch.bincount(tokens_N, minlength=151_936), logits_V.double().softmax(-1)) > LEAST_P_VALUE
    )


def test_every_random_bit_is_set_half_of_the_time_and_alone() -> None:
    rows_N = torch.arange(256)
    bits = random_bits(rows_N, rows_N * 3, 1024, 0).flatten()
    is_set = torch.stack([(bits >> bit) & 1 for bit in range(31)]).double()
    correlation = (2 * is_set - 1) @ (2 * is_set - 1).T / is_set.shape[1]
    # 262,144 coin flips: a standard deviation of 0.002, and 5 of them for the worst of 500 pairs.
    assert (is_set.mean(1) - 0.5).abs().max() < 0.005
    assert (correlation - torch.eye(31)).abs().max() < 0.01


def test_noise_has_the_moments_of_a_gumbel_variate() -> None:
    gumbel_NV = -log_exponential(torch.arange(512), torch.arange(512), 2048, 0)
    assert gumbel_NV.mean().item() == pytest.approx(0.577216, abs=0.006)
    assert gumbel_NV.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.02)


def test_greedy_config_overrides_every_temperature() -> None:
    logits_NV = torch.randn(32, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingBatch(torch.full((32,), 2.0), torch.arange(32), torch.arange(32))
    assert torch.equal(Gumbel(GumbelConfig(greedy=True)).sample(logits_NV, params), logits_NV.argmax(-1))


def test_a_temperature_that_float32_can_hardly_hold_is_greedy() -> None:
    logits_NV = torch.randn(32, 50, generator=torch.Generator().manual_seed(0)) - 6
    params = SamplingBatch(torch.full((32,), 1e-40), torch.arange(32), torch.arange(32))
    assert torch.equal(Gumbel(GumbelConfig()).sample(logits_NV, params), logits_NV.argmax(-1))


@pytest.mark.parametrize("all_greedy", [False, True])
def test_a_row_of_nan_draws_no_token_and_others_draw_what_they_would(all_greedy: bool) -> None:
    logits_NV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingBatch(torch.tensor([0.0, 1.0] * 3), torch.arange(6), torch.arange(6), all_greedy)
    sampler = Gumbel(GumbelConfig())
    before_N = sampler.sample(logits_NV, params)
    logits_NV[2:4] = torch.nan
    logits_NV[3, :40] = -torch.inf  # as a grammar leaves it
    scores_N, tokens_N = sampler.sample_shard(logits_NV, params, 100)
    assert tokens_N[2:4].tolist() == [NO_TOKEN] * 2 and bool(scores_N[2:4].isnan().all())
    others = [0, 1, 4, 5]
    assert sampler.sample(logits_NV, params)[others].equal(before_N[others])


def draw(logits_NV: Tensor, temperature: float, first_seed: int) -> Tensor:
    seed_N = torch.arange(first_seed, first_seed + logits_NV.shape[0])
    temperature_N = torch.full((logits_NV.shape[0],), temperature)
    return Gumbel(GumbelConfig()).sample(logits_NV, SamplingBatch(temperature_N, seed_N * 31, seed_N % 100))
