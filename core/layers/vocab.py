"""The tensor-parallel embedding and output head: the vocabulary split over the ranks, padded to a multiple of them.

They know nothing of models or tokenizers. Summed (embedding) or concatenated (head) over the ranks they equal the plain
layer. Legend: T tokens, N rows whose logits are wanted, D hidden, V rows of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import Part, Ranks, Runtime, WeightTarget


class VocabParallelEmbedding:
    """An embedding whose vocabulary, padded with zero rows to a multiple of the ranks, is split over them.

    Shapes: token_ids_T (T,) int64 -> (T, D), the same on every rank.
    """

    def __init__(self, vocab_size: int, hidden_size: int, runtime: Runtime) -> None:
        self.ranks = runtime.ranks
        self.part, num_rows = vocab_part(vocab_size, runtime.ranks)
        self.weight_VD = empty_parameter(runtime, num_rows, hidden_size)
        self.weight_VD[self.part.size :].zero_()

    def local(self, token_ids_T: Tensor) -> Tensor:
        """Rows of this rank's tokens; zero for tokens of other ranks."""
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
        return {f"{name}.weight": WeightTarget.shard(self.weight_VD[: self.part.size], 0, self.part)}


class ParallelHead:
    """The output projection onto this rank's shard of the padded vocabulary; may share an embedding's weight.

    Shapes: hidden_ND (N, D) -> (N, padded V / ranks). Column 0 is token id `first_token`. Columns of the padding are
    -inf, so that they never win; concatenated over the ranks they all lie behind the vocabulary.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, runtime: Runtime, *, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        self.embedding = tied_to or VocabParallelEmbedding(vocab_size, hidden_size, runtime)
        self.is_tied = tied_to is not None
        self.num_columns, num_rows = self.embedding.part.size, self.embedding.weight_VD.shape[0]
        self.has_padding = self.num_columns < num_rows
        self.first_token = runtime.ranks.rank * num_rows

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """Logits of this rank's tokens: (N, D) -> (N, padded V / ranks)."""
        logits_NV = functional.linear(hidden_ND, self.embedding.weight_VD)
        if self.has_padding:
            logits_NV[:, self.num_columns :].fill_(-torch.inf)
        return logits_NV

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.weight` -> this rank's rows; ignored if tied, since some checkpoints store the copy all the same."""
        return {f"{name}.weight": WeightTarget.ignored()} if self.is_tied else self.embedding.targets(name)


def vocab_part(vocab_size: int, ranks: Ranks) -> tuple[Part, int]:
    """Tokens of this rank, and the rows it holds with padding: the same number on every rank."""
    num_rows = -(-vocab_size // ranks.size)
    start = min(ranks.rank * num_rows, vocab_size)
    return Part(vocab_size, start, min(start + num_rows, vocab_size)), num_rows


def empty_parameter(runtime: Runtime, *shape: int) -> Tensor:
    """An uninitialised parameter where the runtime wants it."""
    return torch.empty(*shape, device=runtime.device, dtype=runtime.dtype)
