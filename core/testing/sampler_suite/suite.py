"""The conformance suite of samplers: subclass it in your tests and return your sampler from `make`.

Draws are counted and compared with softmax(logits / T). All seeds are fixed, so a sampler passes always or never; a
correct one fails a given count once in a million. Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import NO_TOKEN, Sampler, SamplingBatch, is_offered
from hookline.core.testing.checks import check, check_contract, check_form, check_nothing_kept, check_unchanged
from hookline.core.testing.host_sync import no_host_sync
from hookline.core.testing.sampler_suite.counts import chi_square_p_value, most_repeats, num_repeats

LEAST_P_VALUE = 1e-6
"""Smallest p-value of a chi-square test that passes: a smaller one means draws from another distribution."""
NUM_DRAWS = 8192
"""Draws that each test counts."""
NUM_TOKENS = 8
"""V of the distributions that are counted."""
NUM_TOKENS_OF_A_MODEL = 32_000
"""V of the distribution that is too large to count each token."""
NUM_DRAWS_OF_A_MODEL = 512
"""Draws from it."""
SEEDS = (0, 1, 2, 7, 1 << 31, 1 << 32, (1 << 32) + 1, (1 << 63) - 1)
"""Seeds of the tests; some have bits in their lower or in their upper half alone."""


class SamplerSuite:
    """`class TestMySampler(SamplerSuite): def make(self): return MySampler(MyConfig())`.

    dtypes, device and temperatures narrow the tests; graph_safe and sizes_alike as in the entry's Needs; override
    `distribution` if the sampler draws from another distribution than softmax(logits / T). A sampler must not write to
    its arguments.
    """

    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    device: ClassVar[str] = "cpu"
    graph_safe: ClassVar[bool] = True
    sizes_alike: ClassVar[bool] = False
    temperatures: ClassVar[Sequence[float]] = (0.3, 0.7, 1.0, 2.5)

    def make(self) -> Any:
        """The sampler under test; without `sample_shard`, unless its needs state vocabulary_shards."""
        raise NotImplementedError("return your sampler from make()")

    def distribution(self, logits_V: Tensor, temperature: float) -> Tensor:
        """Probabilities (V,) in float64 that the sampler draws from at this temperature."""
        return (logits_V.double() / temperature).softmax(-1)

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract("sampler", type(self.make()))

    def test_returns_one_int64_token_per_row(self) -> None:
        """Also for one row, for large vocabularies, and for logits that are a slice of wider rows."""
        for dtype in self.dtypes:
            for num_rows, vocab_size in ((1, 5), (3, 1000), (2, 151_936)):
                wide_NV = self._logits(num_rows, vocab_size + 64, dtype)
                params = self._params(num_rows, temperature=1.0)
                tokens_N = self.make().sample(wide_NV[:, :vocab_size], params)
                check_form("what sample returns", tokens_N, (num_rows,), torch.int64)
                in_range = bool(((tokens_N >= 0) & (tokens_N < vocab_size)).all())
                check(in_range, f"sample returns token ids outside the vocabulary of {vocab_size}: {tokens_N.tolist()}")

    def test_sampling_never_waits_for_the_host(self) -> None:
        """Greedy, sampled and in one batch: a graph captures the draw."""
        logits_NV, params = self._logits(4, 50, torch.float32), self._params(4, temperature=1.0)
        params.temperature_N[::2] = 0
        for batch in (params, self._params(4, temperature=0.0, all_greedy=True)) if self.graph_safe else ():
            sampler = self.make()
            sampler.sample(logits_NV, batch)  # the first call may compile
            with torch.no_grad(), no_host_sync("sample"):
                sampler.sample(logits_NV, batch)

    def test_another_number_of_rows_leaves_nothing_behind(self) -> None:
        """Samplers that do not declare sizes_alike pass."""
        if not self.sizes_alike:
            return
        sampler = self.make()
        sampler.sample(self._logits(3, 50, torch.float32), self._params(3, temperature=1.0))
        for num_rows in (1, 5):
            with check_nothing_kept(f"sample of {num_rows} rows"):
                sampler.sample(self._logits(num_rows, 50, torch.float32), self._params(num_rows, temperature=1.0))

    def test_temperature_zero_takes_the_largest_logit(self) -> None:
        """Whatever the seed, and whether or not params.all_greedy says so."""
        for logits_NV in self._various_logits():
            for all_greedy in (False, True):
                params = self._params(logits_NV.shape[0], temperature=0.0, all_greedy=all_greedy)
                self._check_greedy(logits_NV, self.make().sample(logits_NV, params), f"all_greedy={all_greedy}")

    def test_greedy_rows_stay_greedy_beside_sampled_ones(self) -> None:
        """Temperatures are per row."""
        logits_NV = self._logits(64, 50, torch.float32)
        params = self._params(64, temperature=5.0)
        params.temperature_N[::2] = 0
        tokens_N = self.make().sample(logits_NV, params)
        self._check_greedy(logits_NV[::2], tokens_N[::2], "in rows between sampled ones")
        num_best = int((tokens_N[1::2] == logits_NV[1::2].argmax(-1)).sum())
        check(num_best < 24, f"{num_best} of 32 rows at temperature 5 took the largest logit: they are not sampled")

    def test_a_tiny_temperature_is_greedy(self) -> None:
        """Dividing by it must not end in NaN."""
        logits_NV = self._logits(32, 50, torch.float32)
        for temperature in (1e-6, 1e-30):
            tokens_N = self.make().sample(logits_NV, self._params(32, temperature=temperature))
            self._check_greedy(logits_NV, tokens_N, f"at temperature {temperature}")

    def test_draws_follow_the_softmax_over_seeds(self) -> None:
        """Draws at one position with many seeds."""
        for temperature in self.temperatures:
            params = self._params(NUM_DRAWS, temperature=temperature)
            params.position_N.fill_(17)
            self._check_counts(params, f"at temperature {temperature}, one draw for each of {NUM_DRAWS} seeds")

    def test_draws_follow_the_softmax_over_positions(self) -> None:
        """Draws with one seed at many positions."""
        for seed in SEEDS:
            params = self._params(NUM_DRAWS, temperature=1.0)
            params.seed_N.fill_(seed)
            self._check_counts(params, f"of seed {seed} over {NUM_DRAWS} positions")

    def test_draws_reach_every_part_of_a_large_vocabulary(self) -> None:
        """Nearly equally likely tokens are all drawn, and none is drawn in place of its neighbours.

        Sums of probabilities in half precision do the latter, as many tokens add nothing to them. Tested in the
        narrowest of the dtypes, whose sums are the coarsest.
        """
        num_tokens, num_draws = NUM_TOKENS_OF_A_MODEL, NUM_DRAWS_OF_A_MODEL
        params, dtype = self._params(num_draws, temperature=1.0), min(self.dtypes, key=lambda one: one.itemsize)
        logits_V = self._logits(1, num_tokens, dtype)[0] / 32
        counts_V = torch.zeros(num_tokens, dtype=torch.int64)
        logits_NV = logits_V.expand(128, -1).contiguous()
        for first in range(0, num_draws, 128):
            tokens_N = self.make().sample(logits_NV, _pick(params, torch.arange(first, first + 128)))
            counts_V += torch.bincount(tokens_N.cpu(), minlength=num_tokens)
        expected_V = self.distribution(logits_V, 1.0).cpu()
        orders = {"from the likeliest tokens": expected_V.argsort(descending=True, stable=True)}
        orders["from the lowest ids"] = torch.arange(num_tokens)
        for what, order_V in orders.items():
            counts, shares = (values_V[order_V].view(8, -1).sum(1) for values_V in (counts_V, expected_V))
            wanted = [round(share * num_draws) for share in shares.tolist()]
            p_value = chi_square_p_value(counts, shares)
            message = f"eighths of {num_tokens} tokens, {what} on, have {counts.tolist()} draws instead of {wanted}"
            check(p_value > LEAST_P_VALUE, f"{message} (p = {p_value:.1g}, {dtype})")
        found, most = num_repeats(counts_V), most_repeats(expected_V, num_draws)
        message = f"{num_draws} draws from {num_tokens} tokens have {found} pairs of the same token, {most:.0f} at most"
        check(found <= most, f"{message} are likely: tokens are drawn in place of others ({dtype})")

    def test_consecutive_draws_are_independent(self) -> None:
        """Draws of neighbouring positions or seeds are independent, and no copies of each other."""
        logits_NV = torch.zeros(NUM_DRAWS, NUM_TOKENS, device=self.device)
        aliased = float((self._draw_at(logits_NV, 1, 0) == self._draw_at(logits_NV, 0, 1)).double().mean())
        uniform_V = self.distribution(logits_NV[0], 1.0).cpu()
        check(
            aliased < float(uniform_V.square().sum()) + 0.075,
            "seed s + 1 at position p draws what seed s draws at p + 1: the two are only added",
        )
        here = self._draw_at(logits_NV, 0, 0)
        for what, seed, position in (("next position", 0, 1), ("next seed", 1, 0), ("next seed and position", 1, 1)):
            pairs = here * NUM_TOKENS + self._draw_at(logits_NV, seed, position)
            counts = torch.bincount(pairs, minlength=NUM_TOKENS**2)
            p_value = chi_square_p_value(counts, torch.outer(uniform_V, uniform_V).flatten())
            check(p_value > LEAST_P_VALUE, f"a draw and the one of the {what} are not independent (p = {p_value:.1g})")

    def test_other_seeds_and_positions_draw_other_tokens(self) -> None:
        """Every bit of a seed counts, also the upper 32."""
        logits_NV = torch.zeros(256, 1000, device=self.device)
        drawn = {}
        for seed in SEEDS:
            params = self._params(256, temperature=1.0)
            params.seed_N.fill_(seed)
            drawn[seed] = self.make().sample(logits_NV, params)
            check(len(set(drawn[seed].tolist())) > 128, f"seed {seed} draws the same tokens at different positions")
        for seed, other in combinations(SEEDS, 2):
            num_same = int((drawn[seed] == drawn[other]).sum())
            check(num_same < 16, f"seeds {seed} and {other} draw the same token at {num_same} of 256 positions")

    def test_a_draw_depends_on_its_row_alone(self) -> None:
        """The same (logits, seed, position) draws the same token in any order, alone, in any company, and again."""
        logits_NV, params = self._logits(33, 200, torch.float32), self._params(33, temperature=1.5)
        params.temperature_N[::5] = 0
        sampler = self.make()
        tokens_N = sampler.sample(logits_NV, params)
        check(torch.equal(tokens_N, sampler.sample(logits_NV, params)), "the same call twice draws different tokens")
        orders = {"reversed": torch.arange(33).flip(0), "in another order": torch.randperm(33, generator=_generator(5))}
        orders |= {f"as row 0 of {size}": torch.arange(30, 30 - size, -1) for size in (1, 2, 7)}
        for what, index_N in orders.items():
            again_N = self.make().sample(logits_NV[index_N], _pick(params, index_N))
            same = torch.equal(again_N, tokens_N[index_N])
            check(same, f"rows {what} draw other tokens: a draw depends on its row")

    def test_tokens_of_probability_zero_are_never_drawn(self) -> None:
        """A logit of -inf is out, at any temperature."""
        for dtype in self.dtypes:
            logits_NV = self._logits(512, 40, dtype)
            logits_NV[:, ::2] = -torch.inf
            for temperature in (0.0, 1.0, 100.0):
                tokens_N = self.make().sample(logits_NV, self._params(512, temperature=temperature))
                allowed = bool((tokens_N % 2 == 1).all())
                check(allowed, f"a token whose logit is -inf was drawn at temperature {temperature} ({dtype})")

    def test_a_row_of_nan_disturbs_no_other(self) -> None:
        """A row of NaN draws NO_TOKEN, or any token of the vocabulary; the other rows draw the same as without it."""
        logits_NV, params = self._logits(9, 64, torch.float32), self._params(9, temperature=1.0)
        before_N = self.make().sample(logits_NV, params)
        logits_NV[4] = torch.nan
        tokens_N = self.make().sample(logits_NV, params)
        drawn = int(tokens_N[4])
        check(drawn == NO_TOKEN or 0 <= drawn < 64, f"a row of NaN draws {drawn}, neither a token nor NO_TOKEN")
        before_N[4] = drawn
        check(torch.equal(tokens_N, before_N), "rows beside a row of NaN draw other tokens than without it")

    def test_writes_to_nothing_it_is_given(self) -> None:
        """Neither logits nor parameters."""
        for dtype in self.dtypes:
            for temperature in (0.0, 0.8):
                logits_NV, params = self._logits(9, 64, dtype), self._params(9, temperature=temperature)
                before_NV, before = logits_NV.clone(), _pick(params, torch.arange(9))
                self.make().sample(logits_NV, params)
                check_unchanged("logits_NV, which sample was given,", before_NV, logits_NV)
                for name in ("temperature_N", "seed_N", "position_N"):
                    check_unchanged(f"params.{name}", getattr(before, name), getattr(params, name))

    def test_shards_of_the_vocabulary_draw_what_the_whole_does(self) -> None:
        """The best (score, token) over 2, 3 and 4 shards, uneven ones and ones of padding, is the unsharded token."""
        if not is_offered(getattr(self.make(), "sample_shard", Sampler.sample_shard)):
            return
        for dtype in self.dtypes:
            logits_NV, params = self._logits(256, 50, dtype), self._params(256, temperature=1.2)
            params.temperature_N[::4] = 0
            whole_N = self.make().sample(logits_NV, params)
            for bounds in ((0, 25, 50), (0, 1, 50), (0, 17, 34, 50), (0, 7, 11, 40, 50), (0, 17, 34, 50, 64)):
                num_wrong = int((self._best_over_shards(logits_NV, params, bounds) != whole_N).sum())
                what = f"{num_wrong} of 256 rows draw another token from shards with bounds {bounds} than unsharded"
                check(num_wrong == 0, f"{what} ({dtype})")

    def _best_over_shards(self, logits_NV: Tensor, params: SamplingBatch, bounds: Sequence[int]) -> Tensor:
        """The best token over all ranks' best tokens; columns beyond the vocabulary are padding of -inf."""
        padding_NV = torch.full((logits_NV.shape[0], 16), -torch.inf, dtype=logits_NV.dtype, device=self.device)
        padded_NV, best = torch.cat((logits_NV, padding_NV), 1), []
        for first, end in pairwise(bounds):
            scores_N, tokens_N = self.make().sample_shard(padded_NV[:, first:end], params, first)
            check_form("the scores of sample_shard", scores_N, (logits_NV.shape[0],), torch.float32)
            check_form("the tokens of sample_shard", tokens_N, (logits_NV.shape[0],), torch.int64)
            inside = bool(((tokens_N >= first) & (tokens_N < end)).all())
            check(inside, f"sample_shard must return global ids: {tokens_N[:4].tolist()}… are not in [{first}, {end})")
            best.append((scores_N, tokens_N))
        scores_NR, tokens_NR = (torch.stack(parts, 1) for parts in zip(*best, strict=True))
        return tokens_NR.gather(1, scores_NR.argmax(1, keepdim=True)).squeeze(1)

    def _check_greedy(self, logits_NV: Tensor, tokens_N: Tensor, what: str) -> None:
        """Any of several equal largest logits will do."""
        chosen_N = logits_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
        num_wrong = int((chosen_N != logits_NV.max(-1).values).sum())
        check(num_wrong == 0, f"{num_wrong} of {len(tokens_N)} greedy rows did not take the largest logit ({what})")

    def _check_counts(self, params: SamplingBatch, what: str) -> None:
        for dtype in self.dtypes:
            logits_V = self._logits(1, NUM_TOKENS, dtype)[0] / 2
            tokens_N = self.make().sample(logits_V.expand(NUM_DRAWS, -1).contiguous(), params)
            counts = torch.bincount(tokens_N, minlength=NUM_TOKENS)
            expected_V = self.distribution(logits_V, float(params.temperature_N[0]))
            p_value = chi_square_p_value(counts, expected_V)
            shares = [round(count / NUM_DRAWS, 3) for count in counts.tolist()]
            wanted = [round(share, 3) for share in expected_V.tolist()]
            message = f"draws {what} have shares {shares} instead of {wanted} (p = {p_value:.1g}, {dtype})"
            check(p_value > LEAST_P_VALUE, message)

    def _draw_at(self, logits_NV: Tensor, seed: int, position: int) -> Tensor:
        """SampleRows of requests and positions on a grid, moved by this much."""
        params = self._params(NUM_DRAWS, temperature=1.0)
        index_N = torch.arange(NUM_DRAWS, device=self.device)
        params.seed_N.copy_(index_N // 64 * 10 + seed)
        params.position_N.copy_(index_N % 64 * 2 + position)
        tokens_N: Tensor = self.make().sample(logits_NV, params)
        return tokens_N

    def _various_logits(self) -> Iterator[Tensor]:
        for dtype in self.dtypes:
            yield self._logits(16, 100, dtype)
            yield self._logits(4, 100, dtype) * 1000
            yield torch.zeros(4, 10, dtype=dtype, device=self.device)

    def _logits(self, num_rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
        return (3 * torch.randn(num_rows, vocab_size, generator=_generator(vocab_size))).to(self.device, dtype)

    def _params(self, num_rows: int, temperature: float, all_greedy: bool = False) -> SamplingBatch:
        """Rows with seeds 0, 1, 2… at positions 100, 101, 102…"""
        index_N = torch.arange(num_rows, device=self.device)
        temperature_N = torch.full((num_rows,), temperature, dtype=torch.float32, device=self.device)
        return SamplingBatch(temperature_N, index_N.clone(), index_N + 100, all_greedy)


def _pick(params: SamplingBatch, index_N: Tensor) -> SamplingBatch:
    """A copy of some rows."""
    index_N = index_N.to(params.seed_N.device)
    return SamplingBatch(params.temperature_N[index_N], params.seed_N[index_N], params.position_N[index_N])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
