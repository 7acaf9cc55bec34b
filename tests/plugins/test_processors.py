"""The logits processors against the conformance suite, and against plain oracles over random logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.core.contracts import SamplingBatch
from hookline.core.errors import RequestError
from hookline.core.testing.processor_driver import Asked, ProcessorDriver
from hookline.core.testing.processor_suite import ProcessorSuite
from hookline.core.testing.sampler_suite import LEAST_P_VALUE
from hookline.core.testing.sampler_suite.counts import chi_square_p_value
from hookline.plugins.samplers import (
    GumbelConfig,
    MirostatArguments,
    PenaltyArguments,
    TokenAllowlistArguments,
    TokenBiasArguments,
    TruncationArguments,
    WordBanArguments,
)
from hookline.plugins.samplers.gumbel import Gumbel
from hookline.plugins.samplers.mirostat import Mirostat
from hookline.plugins.samplers.penalties import Penalties
from hookline.plugins.samplers.token_allowlist import TokenAllowlist
from hookline.plugins.samplers.token_bias import TokenBias
from hookline.plugins.samplers.truncation import Truncation, thresholds
from hookline.plugins.samplers.word_ban import WordBan
from tests.fuzzing import examples


class AlikeSuite(ProcessorSuite):
    """Of processors that make nothing for a number of rows."""

    sizes_alike = True


class TestTokenBias(AlikeSuite):
    processor, config = TokenBias, TokenBiasArguments
    examples = ({"logit_bias": {5: 2.0}}, {"logit_bias": {0: -1.5, 63: 100.0}}, {"logit_bias": {7: -3.0, 0: 0.0}})


class TestTokenAllowlist(AlikeSuite):
    processor, config = TokenAllowlist, TokenAllowlistArguments
    examples = ({"allowed_token_ids": [3]}, {"allowed_token_ids": [0, 63, 5]})


class TestWordBan(AlikeSuite):
    processor, config = WordBan, WordBanArguments
    examples = ({"bad_words": [[9]]}, {"bad_words": [[12, 0], [5, 6]]}, {"bad_words": [[10, 11, 12, 40]]})


class TestPenalties(AlikeSuite):
    processor, config = Penalties, PenaltyArguments
    examples = (
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 0.7, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    )


class TestMirostat(AlikeSuite):
    processor, config, has_logprobs = Mirostat, MirostatArguments, True
    examples = ({"tau": 1.0}, {"tau": 3.0, "eta": 0.5}, {"tau": 2.5, "eta": 0.01})


class TestTruncation(AlikeSuite):
    processor, config, reads_values_on_cpu = Truncation, TruncationArguments, True
    examples = ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.1}, {"top_k": 1})


def process(processor, config, asked: list[Asked], logits_NV: Tensor) -> Tensor:
    driver = ProcessorDriver(processor, config, logits_NV.shape[1])
    for row, one in enumerate(asked):
        driver.admit(row, one)
    return driver.process(logits_NV, range(len(asked)))


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def kept_by_hand(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token ids that the definition keeps, one step after the other over plain Python floats."""
    kept = set(range(len(logits)))
    if top_k:
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        kept = {token for token in kept if logits[token] >= kth}
    probabilities = torch.tensor([logits[token] if token in kept else -torch.inf for token in range(len(logits))])
    shares = probabilities.double().softmax(-1).tolist()
    if top_p < 1:
        likelier = {token: sum(share for share in shares if share > shares[token]) for token in kept}
        kept = {token for token in kept if likelier[token] < top_p}
    return {token for token in kept if shares[token] >= min_p * max(shares)}


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    st.integers(0, 14),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
)
def test_truncation_keeps_what_the_definition_keeps_also_among_ties(values, top_k, top_p, min_p, temperature) -> None:
    top_p, min_p = round(top_p, 3) + 1e-5, round(min_p, 3) + 1e-5  # no share lies that near to a threshold
    top_p, min_p = min(top_p, 1.0), min(min_p, 1.0)
    logits_V = torch.tensor([float(value) for value in values])
    threshold = thresholds(
        logits_V.unsqueeze(0) / temperature, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    kept = set((logits_V / temperature >= threshold).nonzero().flatten().tolist())
    assert kept == kept_by_hand((logits_V / temperature).tolist(), top_k, top_p, min_p)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_truncation_equals_transformers_warpers(temperature) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits_NV = random_logits(8, 1000)
    for arguments in ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.7, "min_p": 0.02}):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if "top_k" in arguments:
            warpers.append(TopKLogitsWarper(arguments["top_k"]))
        if "top_p" in arguments:
            warpers.append(TopPLogitsWarper(arguments["top_p"]))
        if "min_p" in arguments:
            warpers.append(MinPLogitsWarper(arguments["min_p"]))
        expected_NV = warpers(None, logits_NV.clone())
        asked = [Asked(arguments, temperature=temperature)] * 8
        found_NV = process(Truncation, TruncationArguments, asked, logits_NV)
        torch.testing.assert_close(found_NV / temperature, expected_NV)


def test_a_greedy_request_uses_no_truncation() -> None:
    logits_NV = random_logits(1, 50)
    asked = [Asked({"top_k": 3}, temperature=0.0)]
    assert torch.equal(process(Truncation, TruncationArguments, asked, logits_NV), logits_NV)


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    tokens = [5, 6, 5, 7, 7, 7, 0]
    logits_NV = random_logits(1, 40)
    expected_NV = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits_NV.clone())
    asked = [Asked({"repetition_penalty": 1.7}, tokens, 4)]
    torch.testing.assert_close(process(Penalties, PenaltyArguments, asked, logits_NV), expected_NV, rtol=0, atol=0)


def test_presence_and_frequency_count_the_output_alone() -> None:
    tokens, num_prompt = [5, 6, 5, 7, 7, 8, 5], 3
    logits_NV = random_logits(1, 40)
    expected_NV = logits_NV.clone()
    for token, count in {7: 2, 8: 1, 5: 1}.items():
        expected_NV[0, token] -= 0.5 * count + 1.25
    arguments = {"presence_penalty": 1.25, "frequency_penalty": 0.5}
    found_NV = process(Penalties, PenaltyArguments, [Asked(arguments, tokens, num_prompt)], logits_NV)
    torch.testing.assert_close(found_NV, expected_NV)


def test_bad_words_equal_transformers() -> None:
    from transformers import NoBadWordsLogitsProcessor

    words = [[3], [7, 9], [5, 6, 7, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [6, 7, 30], [7, 7]]
    logits_NV = random_logits(1, 40)
    for tokens in ([5, 6, 7], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [6, 6]):
        expected_NV = NoBadWordsLogitsProcessor(words, eos_token_id=39)(torch.tensor([tokens]), logits_NV.clone())
        asked = [Asked({"bad_words": words}, tokens, 1)]
        assert torch.equal(process(WordBan, WordBanArguments, asked, logits_NV), expected_NV)


def test_bias_and_allowed_tokens_do_what_they_say() -> None:
    logits_NV = random_logits(1, 40)
    biased_NV = process(TokenBias, TokenBiasArguments, [Asked({"logit_bias": {3: 1.5, 0: -2.0}})], logits_NV)
    expected_NV = logits_NV.clone()
    expected_NV[0, 3] += 1.5
    expected_NV[0, 0] -= 2.0
    assert torch.equal(biased_NV, expected_NV)
    found_NV = process(TokenAllowlist, TokenAllowlistArguments, [Asked({"allowed_token_ids": [2, 39]})], logits_NV)
    assert (found_NV > -torch.inf).nonzero()[:, 1].tolist() == [2, 39]
    assert torch.equal(found_NV[0, [2, 39]], logits_NV[0, [2, 39]])


@pytest.mark.parametrize("arguments", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_draws_follow_the_truncated_softmax(arguments, temperature) -> None:
    num_draws, vocab_size = 8192, 24
    logits_V = random_logits(1, vocab_size, seed=4)[0] / 2
    found_NV = process(Truncation, TruncationArguments, [Asked(arguments, temperature=temperature)], logits_V[None])
    kept = kept_by_hand(
        (logits_V / temperature).tolist(),
        arguments.get("top_k", 0),
        arguments.get("top_p", 1.0),
        arguments.get("min_p", 0.0),
    )
    rows = torch.arange(num_draws)
    params = SamplingBatch(torch.full((num_draws,), temperature), rows, rows % 100)
    tokens_N = Gumbel(GumbelConfig()).sample(found_NV.expand(num_draws, -1), params)
    assert set(tokens_N.tolist()) <= kept and 1 < len(kept) < vocab_size
    masked_V = torch.tensor([value if token in kept else -torch.inf for token, value in enumerate(logits_V.tolist())])
    expected = (masked_V.double() / temperature).softmax(-1)
    index = torch.tensor(sorted(kept))
    counts = torch.bincount(tokens_N, minlength=vocab_size)
    assert chi_square_p_value(counts[index], expected[index]) > LEAST_P_VALUE


@pytest.mark.parametrize(
    ("processor", "config", "arguments", "message"),
    [
        (TokenBias, TokenBiasArguments, {"logit_bias": {40: 1.0}}, "token id 40 is outside the vocabulary (0 to 39)"),
        (TokenBias, TokenBiasArguments, {"logit_bias": dict.fromkeys(range(513), 1.0)}, "at most 512 may have a bias"),
        (TokenAllowlist, TokenAllowlistArguments, {"allowed_token_ids": [2, 40]}, "token id 40 is outside"),
        (WordBan, WordBanArguments, {"bad_words": [[1, 40]]}, "token id 40 is outside the vocabulary"),
        (WordBan, WordBanArguments, {"bad_words": [[1]] * 129}, "is 129 token sequences"),
        (WordBan, WordBanArguments, {"bad_words": [[1] * 17]}, "a word has 17 tokens; at most 16"),
        (WordBan, WordBanArguments, {"bad_words": ["text"]}, "there is no tokenizer here"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_with_the_limit(processor, config, arguments, message) -> None:
    with pytest.raises(RequestError) as caught:
        ProcessorDriver(processor, config, 40).admit(0, Asked(arguments))
    assert message in str(caught.value) and "\n" not in str(caught.value)
