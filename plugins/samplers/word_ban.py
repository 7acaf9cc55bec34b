"""bad_words: token sequences whose last token is not drawn after the tokens before it, in prompt or output alike.

Legend: R rows of the table, N rows, V vocabulary, W words, M tokens of a word before its last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec, RequestFacts
from hookline.core.errors import RequestError, shown
from hookline.plugins.samplers import WordBanArguments

MAX_WORDS = 128
"""Most token sequences of a row. A word given as text has two."""
MAX_BEGINNING = 15
"""Most tokens of a word before its last."""
ANY = -1
"""A value that matches any token; short words are padded with it on the left."""


class WordBan(LogitsProcessor):
    """Keeps each row's words without their last tokens, and the last tokens apart; an unused place has
    no last token.
    """

    reads_tokens = True

    def __init__(self, spec: ProcessorSpec) -> None:
        self.vocab_size, device = spec.vocab_size, spec.device
        self.beginnings_RWM = torch.full((spec.num_rows, MAX_WORDS, MAX_BEGINNING), ANY, device=device)
        self.lasts_RW = torch.full((spec.num_rows, MAX_WORDS), ANY, device=device)
        self.offsets_M = torch.arange(-MAX_BEGINNING, 0, device=device)

    @staticmethod
    def encode(arguments: WordBanArguments, request: RequestFacts) -> Sequence[int]:
        """The words' token ids, checked."""
        if len(arguments.bad_words) > MAX_WORDS:
            raise RequestError(
                f"sampling.bad_words is {len(arguments.bad_words)} token sequences (a text is two, one for its place "
                f"at a text's beginning and one after a space); at most {MAX_WORDS} are allowed"
            )
        return [value for word in arguments.bad_words for value in _encoded(word, request.vocab_size)]

    def load(self, row: int, values_X: Tensor) -> None:
        """Store the words of the request in the row."""
        words_WM1 = values_X.view(-1, MAX_BEGINNING + 1)
        count = len(words_WM1)
        self.lasts_RW[row].fill_(ANY)
        self.beginnings_RWM[row, :count] = words_WM1[:, :-1]
        self.lasts_RW[row, :count] = words_WM1[:, -1]

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """See LogitsProcessor."""
        assert rows.tokens_RL is not None
        places_NM = rows.sampling.position_N.unsqueeze(1) + self.offsets_M
        recent_NM = rows.tokens_RL[rows.rows_N.unsqueeze(1), places_NM.clamp(min=0)].long()
        recent_N1M = recent_NM.masked_fill(places_NM < 0, ANY - 1).unsqueeze(1)
        beginnings_NWM = self.beginnings_RWM.index_select(0, rows.rows_N)
        lasts_NW = self.lasts_RW.index_select(0, rows.rows_N)
        is_next_NW = ((beginnings_NWM == recent_N1M) | (beginnings_NWM == ANY)).all(-1) & (lasts_NW != ANY)
        # Adding, since several places may name a token, and an unused place names token 0.
        forbidden_NW = torch.zeros_like(lasts_NW, dtype=torch.float32).masked_fill_(is_next_NW, -torch.inf)
        return logits_NV.scatter_add_(1, lasts_NW.clamp(min=0), forbidden_NW)


def _encoded(word: str | Sequence[int], vocab_size: int) -> list[int]:
    if isinstance(word, str):
        what = f"sampling.bad_words={shown(word)}"
        raise RequestError(f"{what} is a text, and there is no tokenizer here: give its token ids")
    if max(word) >= vocab_size:
        raise RequestError(
            f"sampling.bad_words: token id {max(word)} is outside the vocabulary (0 to {vocab_size - 1})"
        )
    if len(word) > MAX_BEGINNING + 1:
        raise RequestError(f"sampling.bad_words: a word has {len(word)} tokens; at most {MAX_BEGINNING + 1} fit")
    return [*[ANY] * (MAX_BEGINNING + 1 - len(word)), *word]
