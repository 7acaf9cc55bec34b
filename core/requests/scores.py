"""Log-probabilities on the host: a request keeps the scored rows that arrive, and turns them into its caller's.

`core.worker.results.scores` describes the layout of a row. Legend: K alternatives, X = 2 + 2K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hookline.core.outputs import TokenLogprob
from hookline.core.requests.prompt_readers import ChunkRead, PromptReader
from hookline.core.util.arrays import Array, IntArray, TokenArray, VectorArray

DRAW_SCORES = "scores of draws"
"""The name of the scored rows (N, X) of a step in StepResult.extras; it has spaces, which no plugin's name has."""
NUM_LOGPROBS = (0, 1, 5, 10, 20)
"""The number of alternatives is rounded up to one of these, so that few graphs and kernels serve all requests. For
prompts, each number has its own reader, whose index is the number's place here."""


def rounded_logprobs(count: int) -> int:
    """How many alternatives a step scores if its requests ask for at most `count`."""
    return next(size for size in NUM_LOGPROBS if size >= count)


class Scores:
    """The scored rows of the tokens that one request draws."""

    def __init__(self, num_logprobs: int) -> None:
        self.num_logprobs = num_logprobs
        self._rows: list[IntArray] = []

    def add(self, row_X: IntArray) -> None:
        """Keep the row of the next sampled token."""
        self._rows.append(row_X.copy())

    def drop_last(self) -> None:
        """Forget the newest sampled token, which is not part of the answer."""
        if self._rows:
            self._rows.pop()

    @property
    def last_logprob(self) -> float | None:
        """The newest token's log-probability; None without any."""
        return _floats(self._rows[-1][1:2])[0] if self._rows else None

    def sampled(self, first: int = 0) -> list[TokenLogprob]:
        """Log-probabilities of the generated tokens from number `first` on."""
        return [_read(row, self.num_logprobs) for row in self._rows[first:]]


class PromptScores(PromptReader):
    """The scored rows of one request's prompt, of all tokens after the first."""

    ends_request = False

    def __init__(self, num_logprobs: int, num_prompt_tokens: int) -> None:
        self.num_logprobs, self._num_rows = num_logprobs, num_prompt_tokens - 1
        self._rows: dict[int, Array] = {}

    @property
    def needs_whole_prompt(self) -> bool:
        """See PromptReader: true until all rows are scored."""
        return len(self._rows) < self._num_rows

    def read(self, tokens_L: TokenArray, start: int, length: int, *, is_last: bool) -> ChunkRead | None:
        """See PromptReader: hidden states give the log-probabilities of the tokens one position further on."""
        first, end = start + 1, min(start + length, self._num_rows) + 1
        if first >= end:
            return None
        values = tokens_L[first:end].astype(np.int64)
        index = NUM_LOGPROBS.index(rounded_logprobs(self.num_logprobs))
        return ChunkRead(index, first, end - first, values=values)

    def keep(self, chunk: ChunkRead, rows: VectorArray) -> None:
        """See PromptReader."""
        self._rows.update(enumerate(rows.view(np.int32).copy(), start=chunk.first))

    def output(self) -> Mapping[str, Any]:
        """See PromptReader: None for the first token, and for tokens not yet computed when the request ended."""
        rows = [self._rows.get(position) for position in range(1, self._num_rows + 1)]
        found = [None, *(None if row is None else _read(row, self.num_logprobs) for row in rows)]
        return {"prompt_logprobs": found}


def _read(row_X: Array, num_logprobs: int) -> TokenLogprob:
    count = (len(row_X) - 2) // 2
    ids = row_X[2 : 2 + num_logprobs].tolist()
    values = _floats(row_X[2 + count : 2 + count + num_logprobs])
    return TokenLogprob(int(row_X[0]), _floats(row_X[1:2])[0], tuple(zip(ids, values, strict=True)))


def _floats(bits: Array) -> list[float]:
    values: list[float] = bits.astype(np.int32).view(np.float32).tolist()
    return values
