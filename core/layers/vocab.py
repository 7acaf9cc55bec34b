"""The tensor-parallel embedding and output head: the vocabulary split over the ranks, padded to a multiple of them.

Summed (embedding) or concatenated (head) over the ranks they equal the plain layer. Legend: T tokens, N rows whose
logits are wanted, D hidden, V rows of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import MatrixPiece, Part, Ranks, Runtime, Weight, WeightTarget
from hookline.core.layers.weights import PLAIN, empty_parameter, head_weight


class VocabParallelEmbedding:
    """An embedding whose vocabulary, padded with zero rows to a multiple of the ranks, is split over them.

    vocab_size, hidden_size: of the whole embedding. weight_VD: this rank's rows; padding rows are zero. part: its
    tokens. is_tied: whether the head has the same weight. If the model is cut into stages, the first stage has the
    embedding, and the last one too if it is tied; other stages allocate nothing and must not call it.
    Shapes: token_ids_T (T,) int64 -> (T, D), the same on every rank.
    """

    def __init__(self, vocab_size: int, hidden_size: int, runtime: Runtime, *, is_tied: bool = False) -> None:
        """Allocate this rank's rows, uninitialised but for the padding, on runtime.device."""
        stage = runtime.stage
        self.ranks, self.is_here = runtime.ranks, stage.is_first or (is_tied and stage.is_last)
        self.part, num_rows = vocab_part(vocab_size, runtime.ranks)
        self.weight_VD = empty_parameter(runtime, num_rows if self.is_here else 0, hidden_size)
        self.weight_VD[self.part.size :].zero_()

    def local(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings of this rank's tokens (T, D); rows of other ranks' tokens are zero."""
        row_T = token_ids_T - self.part.start
        is_elsewhere_T = (row_T < 0) | (row_T >= self.part.size)
        hidden_TD = functional.embedding(row_T.masked_fill(is_elsewhere_T, 0), self.weight_VD)
        return hidden_TD.masked_fill_(is_elsewhere_T.unsqueeze(-1), 0)

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Look the tokens up: (T,) -> (T, D)."""
        if self.ranks.size == 1:
            return functional.embedding(token_ids_T, self.weight_VD)
        return self.ranks.all_reduce(self.local(token_ids_T))

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.weight` -> this rank's rows, without the padding."""
        if not self.is_here:
            return {f"{name}.weight": WeightTarget.ignored()}
        return {f"{name}.weight": WeightTarget.shard(self.weight_VD[: self.part.size], 0, self.part)}


class ParallelHead:
    """The output projection onto this rank's shard of the padded vocabulary; may share an embedding's weight.

    Shapes: hidden_ND (N, D) -> (N, padded V / ranks). Column 0 is token id `first_token`. Columns of the padding are
    -inf, so that they never win; concatenated over the ranks they all lie behind the vocabulary.
    tied_to: the embedding whose weight it uses; then it allocates none. If the model is cut into stages, the last one
    alone has a weight.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, runtime: Runtime, *, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        """Allocate this rank's rows, uninitialised, on runtime.device, or share `tied_to`'s rows."""
        self.tied_to, self.is_here = tied_to, runtime.stage.is_last
        self.part, num_rows = vocab_part(vocab_size, runtime.ranks)
        self.features, self.num_columns = Part(hidden_size, 0, hidden_size), self.part.size
        self.has_padding = self.num_columns < num_rows
        self.first_token = runtime.ranks.rank * num_rows
        if tied_to is not None:
            self.weight: Weight = head_weight(tied_to.weight_VD, runtime)
        else:
            self.weight = (runtime.weights or PLAIN).head(runtime, num_rows if self.is_here else 0, hidden_size)

    @property
    def weight_VD(self) -> Tensor:
        """The rank's rows in the model's dtype; see Weight.plain."""
        return self.weight.plain()

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """Logits of this rank's tokens: (N, D) -> (N, padded V / ranks)."""
        logits_NV = self.weight.linear(hidden_ND, None)
        if self.has_padding:
            logits_NV[:, self.num_columns :].fill_(-torch.inf)
        return logits_NV

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.weight` -> this rank's rows, or the embedding whose weight it has."""
        if self.tied_to is not None:
            return {f"{name}.weight": WeightTarget.tied(self.tied_to.weight_VD)}
        if not self.is_here:
            return {f"{name}.weight": WeightTarget.ignored()}
        return self.weight.targets([MatrixPiece(name, 0, self.part, self.features)])


def vocab_part(vocab_size: int, ranks: Ranks) -> tuple[Part, int]:
    """The tokens of this rank, and its number of rows with padding, which is the same on every rank."""
    num_rows = -(-vocab_size // ranks.size)
    start = min(ranks.rank * num_rows, vocab_size)
    return Part(vocab_size, start, min(start + num_rows, vocab_size)), num_rows
