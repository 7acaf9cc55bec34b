"""Grammar back ends with one planted fault each. Legend: as in core/contracts/grammar.py."""

from __future__ import annotations

import time

from hookline.core.testing.plain_grammar import PlainGrammars, PlainMatcher, allow


def made_of(matcher: type[PlainMatcher]) -> type[PlainGrammars]:
    return type(matcher.__name__ + "s", (PlainGrammars,), {"matcher_class": matcher})


class AllowsEverything(PlainMatcher):
    def fill(self, mask_W):
        mask_W[:] = -1


class AllowsPadding(PlainMatcher):
    def fill(self, mask_W):
        super().fill(mask_W)
        allow(mask_W, [len(self.grammar.vocabulary.tokens) - 1])


class AllowsSpecialTokens(PlainMatcher):
    def fill(self, mask_W):
        super().fill(mask_W)
        allow(mask_W, self.grammar.vocabulary.special_ids)


class ForgetsTheEnd(PlainMatcher):
    def fill(self, mask_W):
        super().fill(mask_W)
        for stop in self.grammar.vocabulary.stop_ids:
            mask_W.view("uint32")[stop // 32] &= ~(1 << stop % 32) & 0xFFFFFFFF


class AllowsOneByteAtMost(PlainMatcher):
    """A way to every text, but none to those with longer characters."""

    def fill(self, mask_W):
        super().fill(mask_W)
        for token_id, token in enumerate(self.grammar.vocabulary.tokens):
            is_short = len(token) < 2 and token < b"\x80"
            if not is_short and token_id not in self.grammar.vocabulary.stop_ids:
                mask_W.view("uint32")[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF


class TakesEverything(PlainMatcher):
    def advance(self, tokens):
        self.taken += tokens
        return True


class SaysNothing(PlainMatcher):
    def advance(self, tokens):
        super().advance(tokens)


class RollsBackOneOnly(PlainMatcher):
    def rollback(self, num_tokens):
        super().rollback(1)


class RemembersTheEnd(PlainMatcher):
    is_over = False

    def advance(self, tokens):
        fits = super().advance(tokens)
        self.is_over |= super().is_terminated
        return fits

    @property
    def is_terminated(self):
        return self.is_over


class KeepsWhatDoesNotFit(PlainMatcher):
    def advance(self, tokens):
        fits = super().advance(tokens)
        if not fits:
            self.taken += tokens
        return fits


class NeverEnds(PlainMatcher):
    is_terminated = False


class EndsWhereItMayGoOn(PlainMatcher):
    @property
    def is_terminated(self):
        return self.is_accepting


class SharesItsState(PlainMatcher):
    def __init__(self, grammar):
        super().__init__(grammar)
        self.taken = grammar.__dict__.setdefault("shared", [])


class RaisesOtherErrors(PlainGrammars):
    def compile(self, wanted):
        if wanted.kind != "choice":
            raise KeyError(wanted.kind)
        return super().compile(wanted)


class SaysALot(PlainGrammars):
    def compile(self, wanted):
        if wanted.kind != "choice":
            self.vocabulary.encode("a")
            from hookline.core.errors import RequestError

            raise RequestError("two\nlines")
        return super().compile(wanted)


class AcceptsWhatItDoesNotKnow(PlainGrammars):
    def compile(self, wanted):
        if wanted.kind == "choice":
            return super().compile(wanted)
        return super().compile(type(wanted)(choice=("anything",)))


class TakesItsTime(PlainGrammars):
    def compile(self, wanted):
        if wanted.kind == "choice" and len(wanted.value) > 900:
            end_s = time.thread_time() + 2.1
            while time.thread_time() < end_s:
                pass
        return super().compile(wanted)


class MixesRowsUp(PlainGrammars):
    def fill(self, matchers, masks_NW):
        for matcher, mask_W in zip(matchers, masks_NW[::-1], strict=True):
            matcher.fill(mask_W)


class HoldsWhatItRefuses(PlainGrammars):
    @classmethod
    def cannot_hold(cls, keyword, value):
        return False


class DoesNotSayWhatItHolds(PlainGrammars):
    @classmethod
    def cannot_hold(cls, keyword, value):
        return None


FAULTS = {
    made_of(AllowsEverything): "test_drafts_leave_nothing_behind: which the mask allows, was refused",
    made_of(AllowsPadding): "test_drafts_leave_nothing_behind: which the mask allows, was refused",
    made_of(AllowsSpecialTokens): "test_drafts_leave_nothing_behind: which the mask allows, was refused",
    made_of(ForgetsTheEnd): "test_masks_allow_what_trying_every_token_does: must be allowed",
    made_of(AllowsOneByteAtMost): "test_masks_allow_what_trying_every_token_does: nothing leads to",
    made_of(TakesEverything): "test_tokens_that_do_not_fit_are_refused: was taken",
    made_of(SaysNothing): "test_a_stop_token_ends_a_complete_text: was refused",
    made_of(RollsBackOneOnly): "test_rollback_restores_masks: tokens back, the mask is another one",
    made_of(RemembersTheEnd): "test_drafts_leave_nothing_behind: tokens that were taken back leave something",
    made_of(KeepsWhatDoesNotFit): "test_drafts_leave_nothing_behind: a token that does not fit leaves something behind",
    made_of(NeverEnds): "test_masks_allow_what_trying_every_token_does: is_terminated is not True",
    made_of(EndsWhereItMayGoOn): "test_masks_allow_what_trying_every_token_does: is_terminated is not False",
    made_of(SharesItsState): "test_matchers_do_not_share_their_state: another matcher moved this one",
    RaisesOtherErrors: "test_hostile_grammars_end_in_time: in place of RequestError",
    SaysALot: "test_hostile_grammars_end_in_time: not one short line",
    AcceptsWhatItDoesNotKnow: "test_hostile_grammars_end_in_time: was accepted, and is invalid",
    TakesItsTime: "test_hostile_grammars_end_in_time: refuse it by its size",
    MixesRowsUp: "test_matchers_do_not_share_their_state: fill of several",
    HoldsWhatItRefuses: "test_what_it_does_not_say_it_cannot_hold_it_holds: "
    "is refused, and cannot_hold does not say so",
    DoesNotSayWhatItHolds: "test_what_it_does_not_say_it_cannot_hold_it_holds: is None, not a bool",
}
