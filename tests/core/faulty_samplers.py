"""Samplers with one planted fault each, and what the conformance suite must say. Legend: as in core/contracts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hookline.core.contracts import Sampler, SamplingBatch
from hookline.core.testing.plain_sampler import PlainSampler


class IgnoresTheSeed(PlainSampler):
    """SampleRows from a generator of its own, as torch.multinomial would."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        return -(-torch.rand(len(seed_N), num_tokens, generator=self.generator).double().log()).log()


class KeepsTheLatestPositions(PlainSampler):
    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        self.latest_N = params.position_N + 0
        return super().sample(logits_NV, params)


class AsksWhetherAllAreGreedy(PlainSampler):
    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        if bool((params.temperature_N == 0).all()):
            return logits_NV.argmax(-1)
        return super().sample(logits_NV, params)


class DrawsTheSampledRowsAlone(PlainSampler):
    """Picks them by a mask, whose number of rows only the device knows."""

    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        tokens_N, is_sampled_N = logits_NV.argmax(-1), params.temperature_N > 0
        tokens_N[is_sampled_N] = super().sample(logits_NV, params)[is_sampled_N]
        return tokens_N


class CountsItsCalls(PlainSampler):
    num_calls = 0

    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        self.num_calls += 1
        return super().noise(seed_N, position_N + self.num_calls, first_token, num_tokens)


class DependsOnTheRow(PlainSampler):
    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        return super().noise(seed_N + torch.arange(len(seed_N)), position_N, first_token, num_tokens)


class IgnoresThePosition(PlainSampler):
    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        return super().noise(seed_N, torch.zeros_like(position_N), first_token, num_tokens)


class AddsSeedAndPosition(PlainSampler):
    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        return super().noise(seed_N + position_N, torch.zeros_like(position_N), first_token, num_tokens)


class CutsTheSeedTo32Bits(PlainSampler):
    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        return super().noise(seed_N & 0xFFFFFFFF, position_N, first_token, num_tokens)


class IgnoresTheTemperature(PlainSampler):
    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        temperature_N = (params.temperature_N > 0).float()
        return super().sample_shard(logits_NV, replace(params, temperature_N=temperature_N), first_token)


class DividesByZero(PlainSampler):
    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        temperature_N = params.temperature_N.clamp_min(0.05)
        return super().sample_shard(logits_NV, replace(params, temperature_N=temperature_N), first_token)


class CountsShardsFromOne(PlainSampler):
    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        scores_N, tokens_N = super().sample_shard(logits_NV, params, first_token)
        return scores_N, tokens_N + (first_token > 0)


class ReturnsLocalIds(PlainSampler):
    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        scores_N, tokens_N = super().sample_shard(logits_NV, params, first_token)
        return scores_N, tokens_N - first_token


class SameNoiseInEveryShard(PlainSampler):
    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        return super().noise(seed_N, position_N, 0, num_tokens)


class ReturnsInt32(PlainSampler):
    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        return super().sample(logits_NV, params).int()


class ReturnsAColumn(PlainSampler):
    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        return super().sample(logits_NV, params).unsqueeze(1)


class AlwaysGreedy(PlainSampler):
    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        return logits_NV.argmax(-1)


class NeverGreedy(PlainSampler):
    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        temperature_N = params.temperature_N.masked_fill(params.temperature_N == 0, 1.0)
        return super().sample_shard(logits_NV, replace(params, temperature_N=temperature_N), first_token)


class ScalesTheLogitsItWasGiven(PlainSampler):
    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        tokens_N = super().sample(logits_NV, params)
        logits_NV.mul_(0.5)
        return tokens_N


class DrawsForbiddenTokens(PlainSampler):
    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        return super().sample_shard(logits_NV.clamp_min(-100.0), params, first_token)


class IsSlightlyBiased(PlainSampler):
    """A tenth too much noise: the shares are a few percent off."""

    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        return 1.1 * super().noise(seed_N, position_N, first_token, num_tokens)


class KeepsTheLikeliest50(PlainSampler):
    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        least_N1 = logits_NV.topk(min(50, logits_NV.shape[1])).values[:, -1:]
        return super().sample_shard(logits_NV.masked_fill(logits_NV < least_N1, -torch.inf), params, first_token)


class KeepsTheFirst1000Ids(PlainSampler):
    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        return super().sample(logits_NV[:, :1000], params)


class SumsProbabilities(PlainSampler):
    """No fault: draws where the sum of probabilities passes a uniform number. The whole vocabulary alone."""

    sample_shard = Sampler.sample_shard
    dtype = torch.float32

    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        noise_N1 = self.noise(params.seed_N, params.position_N, 0, 1)
        uniform_N1 = (-(-noise_N1).exp()).exp()
        temperature_N1 = params.temperature_N.double().clamp_min(1e-300).unsqueeze(1)
        probabilities_NV = (logits_NV.double() / temperature_N1).softmax(-1)
        sums_NV = probabilities_NV.to(self.dtype).cumsum(-1).double()
        tokens_N = torch.searchsorted(sums_NV, uniform_N1 * sums_NV[:, -1:], right=True).squeeze(1)
        tokens_N = tokens_N.clamp_max(logits_NV.shape[1] - 1)
        return torch.where(params.temperature_N == 0, logits_NV.argmax(-1), tokens_N)


class SumsInHalfPrecision(SumsProbabilities):
    dtype = torch.float16


FAULTS = {
    KeepsTheLatestPositions: "test_another_number_of_rows_leaves_nothing_behind: "
    "sample of 1 rows keeps what it made for a new size: 1 tensors, (1,) of torch.int64",
    AsksWhetherAllAreGreedy: "test_sampling_never_waits_for_the_host: "
    "sample waits for the device: Tensor.__bool__ in faulty_samplers.py:",
    DrawsTheSampledRowsAlone: "test_sampling_never_waits_for_the_host: "
    "sample waits for the device: torch's index in faulty_samplers.py:",
    CountsItsCalls: "test_a_draw_depends_on_its_row_alone: the same call twice draws different tokens",
    IgnoresTheSeed: "test_a_draw_depends_on_its_row_alone: the same call twice draws different tokens",
    DependsOnTheRow: "test_a_draw_depends_on_its_row_alone: a draw depends on its row",
    IgnoresThePosition: "test_other_seeds_and_positions_draw_other_tokens: "
    "draws the same tokens at different positions",
    AddsSeedAndPosition: "test_consecutive_draws_are_independent: the two are only added",
    CutsTheSeedTo32Bits: "test_other_seeds_and_positions_draw_other_tokens: "
    "draw the same token at 256 of 256 positions",
    IgnoresTheTemperature: "test_draws_follow_the_softmax_over_seeds: draws at temperature 0.3, one draw for each",
    DividesByZero: "test_a_tiny_temperature_is_greedy: did not take the largest logit",
    CountsShardsFromOne: "test_shards_of_the_vocabulary_draw_what_the_whole_does: sample_shard must return global ids",
    ReturnsLocalIds: "test_shards_of_the_vocabulary_draw_what_the_whole_does: sample_shard must return global ids",
    SameNoiseInEveryShard: "test_shards_of_the_vocabulary_draw_what_the_whole_does: from shards with bounds",
    ReturnsInt32: "test_returns_one_int64_token_per_row: what sample returns has dtype torch.int32",
    ReturnsAColumn: "test_returns_one_int64_token_per_row: what sample returns has shape (1, 1)",
    AlwaysGreedy: "test_greedy_rows_stay_greedy_beside_sampled_ones: took the largest logit: they are not sampled",
    NeverGreedy: "test_greedy_rows_stay_greedy_beside_sampled_ones: greedy rows did not take the largest logit",
    ScalesTheLogitsItWasGiven: "test_writes_to_nothing_it_is_given: logits_NV, which sample was given, was changed",
    DrawsForbiddenTokens: "test_tokens_of_probability_zero_are_never_drawn: a token whose logit is -inf was drawn",
    IsSlightlyBiased: "test_draws_follow_the_softmax_over_positions: have shares",
    KeepsTheLikeliest50: "test_draws_reach_every_part_of_a_large_vocabulary: "
    "from the likeliest tokens on, have [512, 0, 0, 0, 0, 0, 0, 0] draws instead of",
    KeepsTheFirst1000Ids: "test_draws_reach_every_part_of_a_large_vocabulary: "
    "from the lowest ids on, have [512, 0, 0, 0, 0, 0, 0, 0] draws instead of",
    SumsInHalfPrecision: "test_draws_reach_every_part_of_a_large_vocabulary: 512 draws from 32000 tokens have",
}
