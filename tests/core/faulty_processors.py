"""A correct logits processor, and ones with one planted fault each. Legend: as in core/contracts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec


@dataclass
class PlainProcessorArguments:
    amount: float = 0.0
    token: int = -1


class PlainProcessor(LogitsProcessor):
    """Adds `amount` to every even token and forbids `token`; shows it through columns and through load."""

    def __init__(self, spec: ProcessorSpec) -> None:
        self.tokens_R = torch.full((spec.num_rows,), -1)

    @staticmethod
    def encode(arguments, request) -> list[int]:
        return [arguments.token] if arguments.token >= 0 else []

    def load(self, row: int, values_X: Tensor) -> None:
        self.tokens_R[row] = values_X[0] if len(values_X) else -1

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        logits_NV[:, ::2] += rows.columns["amount"].unsqueeze(1)
        is_out_NV = torch.arange(logits_NV.shape[1]) == self.tokens_R[rows.rows_N].unsqueeze(1)
        return logits_NV.masked_fill_(is_out_NV, -torch.inf)


class KeepsTheLastOwner(PlainProcessor):
    def load(self, row: int, values_X: Tensor) -> None:
        if len(values_X):
            self.tokens_R[row] = values_X[0]


class AppliesTheFirstRowToAll(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        return logits_NV + rows.columns["amount"][0] - rows.columns["token"].unsqueeze(1)


class LooksAtTheOtherRows(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        return super().process(logits_NV, rows) - rows.columns["amount"].unsqueeze(1) * rows.columns["amount"][0]


class ReturnsHalfPrecision(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        return super().process(logits_NV, rows).half()


class ReturnsProbabilities(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        return super().process(logits_NV, rows).softmax(-1)


class DoesNothing(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        return logits_NV


class ForbidsEverything(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        return logits_NV.masked_fill(rows.columns["amount"].unsqueeze(1) > 0, -torch.inf)


class MakesNaN(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        return super().process(logits_NV, rows).mul_(torch.where(rows.columns["amount"] > 0, torch.nan, 1.0)[:, None])


class WritesToTheTemperature(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        rows.sampling.temperature_N.add_(1)
        return super().process(logits_NV, rows)


class WritesToTheRows(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        found_NV = super().process(logits_NV, rows)
        rows.rows_N.add_(1)
        return found_NV


class WritesToTheColumns(PlainProcessor):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        found_NV = super().process(logits_NV, rows)
        rows.columns["amount"].neg_()
        return found_NV


class CountsTokens(PlainProcessor):
    """No fault: also subtracts `amount` from the tokens that the request has."""

    reads_tokens = True

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        tokens_NL = rows.tokens_RL[rows.rows_N].long()
        is_there_NL = self.is_there(torch.arange(tokens_NL.shape[1]), rows.sampling.position_N.unsqueeze(1))
        count_NV = torch.zeros_like(logits_NV).scatter_add_(1, tokens_NL, is_there_NL.float())
        return super().process(logits_NV - rows.columns["amount"].unsqueeze(1) * count_NV, rows)

    def is_there(self, place_L: Tensor, position_N1: Tensor) -> Tensor:
        return place_L < position_N1


class CountsAllTokensOfTheRow(CountsTokens):
    def is_there(self, place_L: Tensor, position_N1: Tensor) -> Tensor:
        return place_L < position_N1 + len(place_L)


class CountsTheTokenAtItsPosition(CountsTokens):
    def is_there(self, place_L: Tensor, position_N1: Tensor) -> Tensor:
        return place_L <= position_N1


class CountsTokensOfEveryRow(CountsTokens):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        return super().process(logits_NV, rows) - 0.1 * (rows.tokens_RL[rows.rows_N, :1] > 1)


class WritesToTheTokens(CountsTokens):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        found_NV = super().process(logits_NV, rows)
        rows.tokens_RL[rows.rows_N, rows.sampling.position_N] = 7
        return found_NV


class WritesToThePromptLengths(CountsTokens):
    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        rows.num_prompt_tokens_N.clamp_min_(8)
        return super().process(logits_NV, rows)


class KeepsSomethingForEachSize(PlainProcessor):
    def __init__(self, spec: ProcessorSpec) -> None:
        super().__init__(spec)
        self.room_of: dict[int, Tensor] = {}

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        room_N = self.room_of.setdefault(len(logits_NV), torch.zeros(len(logits_NV), 1))
        return super().process(logits_NV, rows) + room_N


FAULTS = {
    KeepsTheLastOwner: "test_a_row_forgets_its_last_owner: a row that changed hands gets other logits than a new one",
    AppliesTheFirstRowToAll: "test_rows_that_do_not_use_it_keep_their_logits: "
    "process changes the logits of a row that does not use it",
    LooksAtTheOtherRows: "test_a_row_depends_on_itself_alone: rows in reverse order get other logits",
    ReturnsHalfPrecision: "test_a_draw_without_a_token_changes_nothing_for_others: breaks its contract in process",
    ReturnsProbabilities: "test_rows_that_do_not_use_it_keep_their_logits: "
    "process changes the logits of a row that does not use it",
    DoesNothing: "test_every_example_changes_its_row: changes no logit",
    ForbidsEverything: "test_every_example_changes_its_row: forbids every token",
    MakesNaN: "test_every_example_changes_its_row: process made a logit NaN",
    WritesToTheTemperature: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "process wrote to rows.sampling.temperature_N",
    WritesToTheRows: "test_a_draw_without_a_token_changes_nothing_for_others: process wrote to rows.rows_N",
    WritesToTheColumns: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "process wrote to rows.columns['amount']",
    WritesToTheTokens: "test_a_draw_without_a_token_changes_nothing_for_others: process wrote to rows.tokens_RL",
    WritesToThePromptLengths: "test_a_draw_without_a_token_changes_nothing_for_others: "
    "process wrote to rows.num_prompt_tokens_N",
    CountsAllTokensOfTheRow: "test_tokens_that_earlier_requests_left_change_nothing: "
    "{'amount': 2.0} gives other logits for other stale tokens",
    CountsTheTokenAtItsPosition: "test_tokens_that_earlier_requests_left_change_nothing: "
    "{'amount': 2.0} gives other logits for other stale tokens",
    CountsTokensOfEveryRow: "test_tokens_that_earlier_requests_left_change_nothing: "
    "stale tokens change the logits of a row that does not use the processor",
    KeepsSomethingForEachSize: "test_another_number_of_rows_leaves_nothing_behind: "
    "process of 3 rows keeps what it made for a new size: 1 tensors, (3, 1)",
}
