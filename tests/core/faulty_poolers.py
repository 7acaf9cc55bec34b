"""Poolers with one planted fault each, and what the conformance suite must say. Legend: as in core/contracts."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.core.contracts import PooledChunks
from hookline.core.testing.plain_pooler import PlainPooler


class ForgetsEarlierPieces(PlainPooler):
    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        return super().accumulate(torch.zeros_like(state_BS), hidden_TD, chunks)


class MixesPrompts(PlainPooler):
    """Divides by the tokens of the whole call."""

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        return state_BS / num_tokens_B.sum()


class CountsOnTheObject(PlainPooler):
    """Keeps what belongs into the state."""

    num_tokens = 0

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        self.num_tokens += len(hidden_TD)
        return super().accumulate(state_BS, hidden_TD, chunks)

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        return state_BS / self.num_tokens


class AsksForTheLengths(PlainPooler):
    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        pieces = hidden_TD.float().split(chunks.lens_B.tolist())
        return state_BS + torch.stack([piece.sum(0) for piece in pieces])


class ScalesInPlace(PlainPooler):
    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        return super().accumulate(state_BS, hidden_TD.mul_(1.5), chunks) / 1.5


class KeepsTheModelsDtype(PlainPooler):
    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        return super().accumulate(state_BS, hidden_TD, chunks).to(hidden_TD.dtype)


class GivesOneNumberMore(PlainPooler):
    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        return torch.cat([super().finish(state_BS, num_tokens_B), num_tokens_B.float().unsqueeze(1)], dim=1)


class TakesEachPiecesFirst(PlainPooler):
    """A first token that begins again with every piece."""

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        return hidden_TD.index_select(0, chunks.starts_B).float()

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        return state_BS


class InventsATask(PlainPooler):
    task = "embedding"


FAULTS: dict[type, str] = {
    ForgetsEarlierPieces: "test_pieces_make_no_difference: a vector that came in pieces of 1 tokens is wrong",
    MixesPrompts: "test_a_prompt_does_not_depend_on_its_neighbours: a vector of a prompt alone is wrong",
    CountsOnTheObject: "test_a_prompt_does_not_depend_on_its_neighbours: a vector of a prompt alone is wrong",
    AsksForTheLengths: "test_pooling_never_waits_for_the_host: accumulate waits for the device: Tensor.tolist",
    ScalesInPlace: "test_hidden_states_are_left_as_they_are: hidden_TD was changed",
    KeepsTheModelsDtype: "test_vectors_are_what_is_expected: what accumulate returns has dtype torch.bfloat16",
    GivesOneNumberMore: "test_vectors_have_their_form: what finish returns has shape (4, 17) and must have (4, 16)",
    TakesEachPiecesFirst: "test_pieces_make_no_difference: a vector that came in pieces of 1 tokens is wrong",
    InventsATask: "test_has_the_methods_of_its_contract: "
    "its task is 'embedding' and must be one of embed, classify, score",
}
