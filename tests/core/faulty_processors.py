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


class KeepsSomethingForEachSize(PlainProcessor):
    def __init__(self, spec: ProcessorSpec) -> None:
        super().__init__(spec)
        self.room_of: dict[int, Tensor] = {}

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        room_N = self.room_of.setdefault(len(logits_NV), torch.zeros(len(logits_NV), 1))
        return super().process(logits_NV, rows) + room_N


FAULTS = {
    KeepsTheLastOwner: "a row that changed hands gets other logits than a new one",
    AppliesTheFirstRowToAll: "process changes the logits of a row that does not use it",
    LooksAtTheOtherRows: "rows in reverse order get other logits",
    ReturnsHalfPrecision: "breaks its contract in process",
    ReturnsProbabilities: "process changes the logits of a row that does not use it",
    DoesNothing: "changes no logit",
    ForbidsEverything: "forbids every token",
    MakesNaN: "process made a logit NaN",
    WritesToTheTemperature: "process wrote to rows.rows_N or rows.sampling",
    WritesToTheRows: "process wrote to rows.rows_N or rows.sampling",
    KeepsSomethingForEachSize: "process of 3 rows keeps what it made for a new size: 1 tensors, (3, 1)",
}
