"""Drafters with one planted fault each, and what the conformance suite must say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import ComputedRow, Drafter, DrafterSpec, DraftRow


class PlainDrafter(Drafter):
    """What followed the newest two tokens the last time that they came."""

    def __init__(self, config: Any, spec: DrafterSpec) -> None:
        self.k, self.vocab_size = 4, spec.vocab_size

    def propose(self, row: DraftRow) -> Sequence[int]:
        tokens = row.tokens
        for end in range(len(tokens) - 1, 1, -1):
            if (tokens[end - 2 : end] == tokens[-2:]).all():
                found: list[int] = tokens[end : end + row.num_drafts].tolist()
                return found
        return []


class ProposesTooMany(PlainDrafter):
    def propose(self, row: DraftRow) -> Sequence[int]:
        return [0] * (row.num_drafts + 1)


class LeavesTheVocabulary(PlainDrafter):
    def propose(self, row: DraftRow) -> Sequence[int]:
        return [self.vocab_size]


class ProposesFloats(PlainDrafter):
    def propose(self, row: DraftRow) -> Any:
        return np.zeros(1)


class WritesToTheTokens(PlainDrafter):
    def propose(self, row: DraftRow) -> Sequence[int]:
        found = super().propose(row)
        if row.tokens.flags.writeable:
            row.tokens[0] += 1
        return found


class CannotForget(PlainDrafter):
    def forget(self, id: int) -> None:
        raise KeyError(id)


class MakesNone(PlainDrafter):
    def __init__(self, config: Any, spec: DrafterSpec) -> None:
        super().__init__(config, spec)
        self.k = 0


class RepeatsTheLastToken(PlainDrafter):
    def propose(self, row: DraftRow) -> Sequence[int]:
        return [int(row.tokens[-1])] * row.num_drafts


class AnswersInAnotherOrder(PlainDrafter):
    def propose_all(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        return [self.propose(row) for row in rows[::-1]]


class LeavesOneOut(PlainDrafter):
    def propose_all(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        return [self.propose(row) for row in rows[1:]]


class CountsHiddenStatesTwice(PlainDrafter):
    def __init__(self, config: Any, spec: DrafterSpec) -> None:
        super().__init__(config, spec)
        self.num_seen: dict[int, int] = {}

    def observe(self, rows: Sequence[ComputedRow]) -> None:
        for row in rows:
            self.num_seen[row.id] = self.num_seen.get(row.id, 0) + len(row.streams[0])

    def propose(self, row: DraftRow) -> Sequence[int]:
        return super().propose(row) or [self.num_seen.get(row.id, 0) % self.vocab_size]


class DraftsAtPlaces(PlainDrafter):
    """On the device, too: what followed the newest two tokens the last time that they came."""

    def propose_on_device(self, tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int) -> Any:
        drafts_BK = torch.full((len(rows_B), num_drafts), -1)
        for place, (row, length) in enumerate(zip(rows_B.tolist(), lengths_B.tolist(), strict=True)):
            found = list(self.propose(DraftRow(row, tokens_RL[row, :length].numpy(), 1, num_drafts)))
            drafts_BK[place, : len(found)] = torch.tensor(found)
        return drafts_BK


class DraftsOneForAll(DraftsAtPlaces):
    def propose_on_device(self, tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int) -> Any:
        return super().propose_on_device(tokens_RL, rows_B[:1], lengths_B[:1], num_drafts)


class DraftsInOrderOfTheRows(DraftsAtPlaces):
    def propose_on_device(self, tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int) -> Any:
        return super().propose_on_device(tokens_RL, rows_B.sort().values, lengths_B, num_drafts)


class LeavesGaps(DraftsAtPlaces):
    def propose_on_device(self, tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int) -> Any:
        found_BK = super().propose_on_device(tokens_RL, rows_B, lengths_B, num_drafts)
        found_BK[:, 0] = -1 if num_drafts > 1 else found_BK[:, 0]
        return found_BK


class CountsLengthsDown(DraftsAtPlaces):
    def propose_on_device(self, tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int) -> Any:
        found_BK = super().propose_on_device(tokens_RL, rows_B, lengths_B, num_drafts)
        lengths_B -= 1
        return found_BK


FAULTS: dict[type, str] = {
    ProposesTooMany: "test_proposes_token_ids_and_no_more_than_asked_for: propose returned 2",
    LeavesTheVocabulary: "test_proposes_token_ids_and_no_more_than_asked_for: propose returned ids outside of 0 to 96",
    ProposesFloats: "test_proposes_token_ids_and_no_more_than_asked_for: "
    "propose returned float64 and not whole numbers",
    WritesToTheTokens: "test_leaves_the_tokens_alone: propose wrote to the tokens of its request",
    CannotForget: "test_forgets_requests_that_it_never_saw: KeyError",
    MakesNone: "test_says_how_many_drafts_it_makes_at_most: its k is 0 and must be an int of at least 1",
    AnswersInAnotherOrder: "test_proposes_for_many_requests_what_it_proposes_for_each: "
    "for a request, for which propose returned",
    LeavesOneOut: "test_proposes_for_many_requests_what_it_proposes_for_each: proposals for 30 requests",
    CountsHiddenStatesTwice: "test_hidden_states_that_it_had_before_change_nothing: shown the same hidden states again",
    DraftsOneForAll: "test_drafts_on_the_device: propose_on_device returned shape (1, 1), not (31, 1)",
    DraftsInOrderOfTheRows: "test_drafts_on_the_device: after a text that began again it drafted",
    LeavesGaps: "test_drafts_on_the_device: propose_on_device returned a draft behind one that is missing",
    CountsLengthsDown: "test_drafts_on_the_device: propose_on_device wrote to the lengths that it was given",
    RepeatsTheLastToken: "test_copies_what_the_request_repeats: after a text that began again it drafted",
}
