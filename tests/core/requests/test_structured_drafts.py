"""Drafts of requests with a grammar, in an engine without a model: the same tokens as without, whatever fails."""

from __future__ import annotations

import pytest

from hookline.core.contracts import Drafter, StructuredOutputs
from hookline.core.errors import RequestError
from hookline.core.outputs import FinishReason
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.plain_grammar import PlainGrammars, PlainMatcher
from tests.core.requests.test_structured_output import STOP, TEXTS, VOCAB_SIZE, VOCABULARY, choice, make_engine, served

LONG = ("aaaaaaaaaaaa", "aaaabbbbcccc", "aaaaccccaaaa", "yes yes yes", "bbbbaaaabbbb")


class Watchful(PlainGrammars):
    """Its matchers assert that they are asked for nothing that they need not do."""

    class Matcher(PlainMatcher):
        def advance(self, tokens):
            assert not self.is_terminated
            return super().advance(tokens)

        def rollback(self, num_tokens):
            assert 0 < num_tokens <= len(self.taken)
            super().rollback(num_tokens)

    @property
    def matcher_class(self):
        return self.Matcher


class LostInAdvance(Watchful):
    """A second "b" is too much for its matchers, and afterwards everything is."""

    class Matcher(Watchful.Matcher):
        method, is_lost = "advance", False

        def advance(self, tokens):
            self.check("advance", [*self.taken, *tokens])
            return super().advance(tokens)

        def fill(self, mask_W):
            self.check("fill", self.taken)
            super().fill(mask_W)

        def check(self, method, tokens):
            text = b"".join(VOCABULARY.tokens[one] for one in tokens)
            self.is_lost |= method == self.method and text.count(b"b") > 1
            if self.is_lost:
                raise RequestError("too many states")

        def rollback(self, num_tokens):
            assert not self.is_lost, "a matcher that raised is asked again"
            super().rollback(num_tokens)


class LostInFill(LostInAdvance):
    class Matcher(LostInAdvance.Matcher):
        method = "fill"


class RaisesInRollback(Watchful):
    class Matcher(Watchful.Matcher):
        def rollback(self, num_tokens):
            raise ValueError("boom")


class NeverGoesBack(Watchful):
    class Matcher(Watchful.Matcher):
        rollback = None


class Foretelling(Drafter):
    """Proposes what earlier outputs had, by their prompts; if errs_every is set, one of so many tokens is another."""

    k, adaptive = 4, False

    def __init__(self, outputs, errs_every=0, pretended_length=None):
        self.outputs, self.errs_every, self.pretended_length = outputs, errs_every, pretended_length

    def propose(self, row):
        place = len(row.tokens) - row.num_prompt_tokens
        tokens = self.outputs[tuple(row.tokens[: row.num_prompt_tokens].tolist())][place : place + row.num_drafts]
        wrong = [self.errs_every and (place + index) % self.errs_every == 2 for index in range(len(tokens))]
        return [(one + 1) % VOCAB_SIZE if errs else one for one, errs in zip(tokens, wrong, strict=True)]

    def forget(self, id):
        pass


def tokens_by_prompt(requests, outputs):
    return {tuple(prompt): list(output.token_ids) for (prompt, _), output in zip(requests, outputs, strict=True)}


REQUESTS = [
    *(([1, 2, seed], choice(*LONG, seed=seed)) for seed in range(8)),
    *(([3, seed], choice(*TEXTS, seed=seed, min_tokens=2)) for seed in range(4)),
    *(([4, seed], choice(*TEXTS, "yyyyyyyy", seed=seed, after="es", max_tokens=60)) for seed in range(4)),
    *(([5, seed], choice(*LONG, seed=seed, stop_token_ids=[ord("c"), ord("s")])) for seed in range(4)),
    *(([6, seed], SamplingParams(seed=seed, max_tokens=9)) for seed in range(2)),
]


@pytest.mark.parametrize(
    ("options", "errs_every"),
    [
        pytest.param({}, 0, id="right"),
        pytest.param({}, 3, id="wrong"),
        pytest.param({"overlap": True}, 4, id="overlap"),
        pytest.param({"num_blocks": 14, "max_num_seqs": 4}, 4, id="preemption"),
        pytest.param({"max_num_batched_tokens": 8, "max_num_seqs": 4}, 4, id="chunks"),
    ],
)
def test_tokens_with_drafts_are_those_without(options, errs_every):
    outputs = served(make_engine(Watchful, **options), REQUESTS)
    engine = make_engine(Watchful, drafter=Foretelling(tokens_by_prompt(REQUESTS, outputs), errs_every), **options)
    found = served(engine, REQUESTS)
    for ours, theirs in zip(found, outputs, strict=True):
        assert (ours.token_ids, ours.finish_reason, ours.error) == (
            theirs.token_ids,
            theirs.finish_reason,
            theirs.error,
        )
    counts = engine.speculation
    assert counts.num_kept > 20 and "structured outputs" not in counts.no_drafts
    if "num_blocks" in options:
        assert any(output.num_preemptions for output in found)
    if not errs_every:
        assert counts.num_drafted == counts.num_kept, "a draft that ends its request is computed for nothing"


@pytest.mark.parametrize("backend", [LostInAdvance, LostInFill])
def test_what_fails_behind_a_draft_that_is_wrong_concerns_no_request(backend):
    """The wrong drafts lead to where the matcher fails; the request never goes there."""
    requests = [([1, seed], choice("aaaaaaaaaaaa", "abbbabbbabbb", seed=seed)) for seed in range(10)]
    outputs = served(make_engine(backend), requests)
    reasons = [output.finish_reason for output in outputs]
    assert {FinishReason.STOP, FinishReason.ERROR} == set(reasons)
    b_texts = {tuple(prompt): VOCABULARY.encode("abbb" * 3) for prompt, _ in requests}
    foretold = tokens_by_prompt(requests, outputs)
    for drafter in (Foretelling(b_texts), Foretelling(foretold | {p: [*t, *b"bbbb"] for p, t in foretold.items()})):
        engine = make_engine(backend, drafter=drafter)
        found = served(engine, requests)
        for ours, theirs in zip(found, outputs, strict=True):
            assert (ours.token_ids, ours.error) == (theirs.token_ids, theirs.error)
        assert engine.speculation.num_drafted > 0


def test_a_matcher_that_fails_to_go_back_ends_its_request_and_is_named():
    requests = [([1], choice("aaaaaaaa", seed=1)), ([2], SamplingParams(seed=2, max_tokens=9))]
    plain = served(make_engine(RaisesInRollback), requests)
    engine = make_engine(RaisesInRollback, drafter=Foretelling(tokens_by_prompt(requests, plain)))
    faulty, other = served(engine, requests)
    assert faulty.is_fault and "grammars 'odd' of plugin 'theirs'" in faulty.error
    assert "fails in rollback: ValueError: boom" in faulty.error
    assert other.token_ids == plain[1].token_ids


@pytest.mark.parametrize(("backend", "length"), [(NeverGoesBack, None), (Watchful, 3.0)])
def test_without_a_way_back_or_with_a_pretended_length_there_are_no_drafts(backend, length):
    requests = [([1, seed], choice(*LONG, seed=seed)) for seed in range(4)]
    plain = served(make_engine(backend), requests)
    engine = make_engine(backend, drafter=Foretelling(tokens_by_prompt(requests, plain), pretended_length=length))
    assert [output.token_ids for output in served(engine, requests)] == [output.token_ids for output in plain]
    assert engine.speculation.num_drafted == 0 and engine.speculation.no_drafts["structured outputs"] > 10


def test_drafts_that_do_not_fit_are_not_computed():
    requests = [([1], choice("aaaaaaaa", seed=1))]
    engine = make_engine(Watchful, drafter=Foretelling({(1,): [ord("a"), *b"axaxaxaxaxax"]}))
    served(engine, requests)
    assert engine.speculation.drafted[0] > 0 and len(engine.speculation.drafted) < 3
    assert engine.speculation.kept == engine.speculation.drafted
    stopping = make_engine(Watchful, drafter=Foretelling({(1,): [STOP] * 20}))
    served(stopping, [([1], SamplingParams(structured_outputs=StructuredOutputs(choice=TEXTS), seed=1))])
    assert stopping.speculation.num_drafted == 0
