"""A correct step extension, and ones with one planted fault each. Legend: as in core/contracts/extension.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hookline.core.contracts import NO_TOKEN, StepExtension

VOCAB_SIZE = 64


@dataclass
class PlainExtensionArguments:
    amount: float = 0.0
    bonus: int = -1


class PlainExtension(StepExtension):
    """Adds `amount` to the stream after layer 1 and to the logit of token `bonus`; tells of draws and streams."""

    layers, reads_layers = (1,), (2,)
    result_width, result_dtype = 2, "float32"

    def __init__(self, spec):
        self.bonus_R = torch.full((spec.num_rows,), -1, dtype=torch.int64)
        self.count_V = torch.arange(spec.vocab_size, dtype=torch.float32)

    @staticmethod
    def start(arguments, request):
        return {"tokens": [], "arguments": arguments}

    @staticmethod
    def encode(arguments, request):
        return [arguments.bonus]

    def load(self, row, values_X):
        self.bonus_R[row] = values_X[0] if len(values_X) else -1

    def after_layer(self, layer, hidden_TD, rows):
        return hidden_TD.add_(rows.columns["amount"].unsqueeze(1))

    def before_draw(self, logits_NV, rows):
        bonus_N = self.bonus_R[rows.rows_N]
        amount_N = torch.where(bonus_N >= 0, rows.columns["amount"], 0.0)
        return logits_NV.scatter_add_(1, bonus_N.clamp(min=0).unsqueeze(1), amount_N.unsqueeze(1))

    def after_draw(self, tokens_N, rows):
        count_N = self.count_V[tokens_N.clamp(min=0)]
        return torch.stack([count_N, rows.streams[2].sum(1)], dim=1)

    @staticmethod
    def on_result(state, values_W):
        return [len(state["tokens"]), float(values_W[0])]

    @staticmethod
    def on_token(state, token_id, logprob):
        state["tokens"].append(token_id)
        return "enough" if len(state["tokens"]) > 40 else None


class WritesToOtherRowsStreams(PlainExtension):
    def after_layer(self, layer, hidden_TD, rows):
        return hidden_TD + rows.columns["amount"].max()


class AddsToPaddingToo(PlainExtension):
    def after_layer(self, layer, hidden_TD, rows):
        return super().after_layer(layer, hidden_TD, rows) + (rows.rows_T == len(self.bonus_R) - 1).unsqueeze(1)


class GivesEveryRowTheFirstOnesLogits(PlainExtension):
    def before_draw(self, logits_NV, rows):
        return super().before_draw(logits_NV, rows) + rows.columns["amount"][0]


class SubtractsTheMeanOfAllRows(PlainExtension):
    def after_layer(self, layer, hidden_TD, rows):
        amount_T = rows.columns["amount"]
        mean = hidden_TD.mean() * (amount_T != 0).unsqueeze(1)
        return super().after_layer(layer, hidden_TD, rows) - mean


class TellsTheMeanOfAllRows(PlainExtension):
    def after_draw(self, tokens_N, rows):
        return super().after_draw(tokens_N, rows) + rows.streams[2].mean()


class RoundsByTheNumberOfRows(PlainExtension):
    """A fault only for a suite with no tolerance."""

    def after_layer(self, layer, hidden_TD, rows):
        is_used_T1 = (rows.columns["amount"] != 0).unsqueeze(1)
        return super().after_layer(layer, hidden_TD, rows) * (1 + 1e-5 * len(rows.rows_T) * is_used_T1)


class WaitsForTheLogits(PlainExtension):
    def before_draw(self, logits_NV, rows):
        return logits_NV if bool((rows.columns["amount"] == 0).all()) else super().before_draw(logits_NV, rows)


class WaitsAfterALayer(PlainExtension):
    def after_layer(self, layer, hidden_TD, rows):
        return hidden_TD.add_(max(rows.columns["amount"].tolist()) * (rows.columns["amount"] != 0).unsqueeze(1))


class WaitsForTokens(PlainExtension):
    def after_draw(self, tokens_N, rows):
        self.last = [int(token) for token in tokens_N]
        return super().after_draw(tokens_N, rows)


class SaysThatItWaits(WaitsForTheLogits):
    """No fault."""

    waits_for_host = True


class PicksRowsByAMask(PlainExtension):
    def after_layer(self, layer, hidden_TD, rows):
        is_used_T = rows.columns["amount"] != 0
        hidden_TD[is_used_T] += rows.columns["amount"][is_used_T].unsqueeze(1)
        return hidden_TD


class TellsOfDrawnTokensOnly(PlainExtension):
    def after_draw(self, tokens_N, rows):
        return super().after_draw(tokens_N, rows)[: -1 if len(tokens_N) > 1 else None]


class ReturnsTheStreamInHalfPrecision(PlainExtension):
    def after_layer(self, layer, hidden_TD, rows):
        return super().after_layer(layer, hidden_TD, rows).half()


class ReplacesWhatAGraphReads(PlainExtension):
    def load(self, row, values_X):
        self.bonus_R = self.bonus_R.clone()
        super().load(row, values_X)


class WidensItsResults(PlainExtension):
    def load(self, row, values_X):
        super().load(row, values_X)
        self.reads_layers = (*self.reads_layers, 3)


class KeepsTheLastOwnersBonus(PlainExtension):
    def load(self, row, values_X):
        if len(values_X):
            self.bonus_R[row] = torch.maximum(self.bonus_R[row], values_X[0])


class LooksUpTokensThatWereNotDrawn(PlainExtension):
    def after_draw(self, tokens_N, rows):
        return torch.stack([self.count_V.gather(0, tokens_N), rows.streams[2].sum(1)], dim=1)


class CountsAllDraws(PlainExtension):
    def after_draw(self, tokens_N, rows):
        num_missing = (tokens_N == NO_TOKEN).sum()
        return super().after_draw(tokens_N, rows) + num_missing


class WritesToTheTokens(PlainExtension):
    def after_draw(self, tokens_N, rows):
        found_NW = super().after_draw(tokens_N, rows)
        tokens_N.add_(1)
        return found_NW


class WritesToAStreamItReads(PlainExtension):
    def before_draw(self, logits_NV, rows):
        rows.streams[2].zero_()
        return super().before_draw(logits_NV, rows)


class WritesToThePositions(PlainExtension):
    def after_layer(self, layer, hidden_TD, rows):
        rows.positions_T.add_(1)
        return super().after_layer(layer, hidden_TD, rows)


STATES: list[dict] = []


class KeepsStatesOfEndedRequests(PlainExtension):
    @staticmethod
    def start(arguments, request):
        STATES.append({"tokens": [], "arguments": arguments})
        return STATES[-1]


class RemembersEndedRequests(PlainExtension):
    names: ClassVar[set[int]] = set()

    @classmethod
    def start(cls, arguments, request):
        cls.names.add(len(cls.names))
        return {"tokens": [], "arguments": arguments}


class KeepsStatesUntilTheyEnd(PlainExtension):
    """No fault."""

    running: ClassVar[dict[int, dict]] = {}

    @classmethod
    def start(cls, arguments, request):
        state = {"tokens": [], "arguments": arguments}
        return cls.running.setdefault(id(state), state)

    @classmethod
    def forget(cls, state):
        del cls.running[id(state)]


class SharesOneState(PlainExtension):
    shared: ClassVar[dict] = {"tokens": []}

    @classmethod
    def start(cls, arguments, request):
        return cls.shared


class TellsATensor(PlainExtension):
    @staticmethod
    def on_result(state, values_W):
        return values_W


class MisspellsAMethod(PlainExtension):
    def on_results(self, state, values_W):
        return values_W.tolist()


class AsksForALayerThatIsNotThere(PlainExtension):
    layers = (4,)


FAULTS = {
    WritesToOtherRowsStreams: "test_rows_that_do_not_use_it_keep_their_logits: "
    "after_layer changes the hidden states of a row that does not use it",
    AddsToPaddingToo: "test_rows_that_do_not_use_it_keep_their_logits: "
    "after_layer changes the hidden states of padding",
    GivesEveryRowTheFirstOnesLogits: "test_rows_that_do_not_use_it_keep_their_logits: "
    "before_draw changes the logits of a row that does not use it",
    SubtractsTheMeanOfAllRows: "test_a_row_depends_on_itself_alone: rows in reverse order get other hidden states",
    TellsTheMeanOfAllRows: "test_a_row_depends_on_itself_alone: gives other results alone than in a crowd",
    WaitsForTheLogits: "test_never_waits_for_the_host_unless_it_says_so: "
    "before_draw waits for the device: Tensor.__bool__ in faulty_extensions.py",
    WaitsAfterALayer: "test_never_waits_for_the_host_unless_it_says_so: "
    "after_layer waits for the device: Tensor.tolist",
    WaitsForTokens: "test_never_waits_for_the_host_unless_it_says_so: after_draw waits for the device: Tensor.__int__",
    PicksRowsByAMask: "test_never_waits_for_the_host_unless_it_says_so: "
    "after_layer waits for the device: torch's index",
    TellsOfDrawnTokensOnly: "test_a_row_depends_on_itself_alone: "
    "breaks its contract in after_draw during a step: it returned shape (2, 2) of float32",
    ReturnsTheStreamInHalfPrecision: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "breaks its contract in after_layer",
    ReplacesWhatAGraphReads: "test_what_a_captured_graph_reads_stays_where_it_is: "
    "self.bonus_R was replaced after it was constructed",
    WidensItsResults: "test_what_a_captured_graph_reads_stays_where_it_is: "
    "reads_layers was replaced after it was constructed",
    KeepsTheLastOwnersBonus: "test_a_row_forgets_its_last_owner: "
    "a row that changed hands gets other logits than a new one",
    LooksUpTokensThatWereNotDrawn: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "fails in after_draw during a step",
    CountsAllDraws: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "a draw without a token changes the results of other rows",
    WritesToTheTokens: "test_a_draw_without_a_token_changes_nothing_for_others: after_draw wrote to tokens_N",
    WritesToAStreamItReads: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "before_draw wrote to rows.streams[2]",
    WritesToThePositions: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "after_layer wrote to rows.positions_T",
    KeepsStatesOfEndedRequests: "test_nothing_is_kept_of_a_request_that_ended: "
    "the state of a request that ended is kept, in a list",
    RemembersEndedRequests: "test_nothing_is_kept_of_a_request_that_ended: "
    "something of requests that ended is kept, in RemembersEndedRequests.names",
    SharesOneState: "test_requests_do_not_share_what_the_host_keeps: beside an equal request",
    TellsATensor: "test_a_draw_without_a_token_changes_nothing_for_others: which is no plain data",
    MisspellsAMethod: "test_has_the_methods_of_its_contract: its on_results is not in the contract",
    AsksForALayerThatIsNotThere: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "its layers are (4,), and the model's layers are 0 to 3",
}
