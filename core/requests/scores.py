"""Log-probabilities on the host: what a caller gets, and what a request keeps of the scored rows that arrive.

The rows are laid out as `core.worker.runner.model_runner` says. Legend: K alternatives, X = 2 + 2K.
"""

from __future__ import annotations

import numpy as np

from hookline.core.outputs import TokenLogprob
from hookline.core.util.arrays import IntArray


class Scores:
    """The scored rows of one request: of the tokens it draws, and of its prompt's tokens after the first."""

    def __init__(self, num_logprobs: int | None, num_prompt_logprobs: int | None, num_prompt_tokens: int) -> None:
        self.num_logprobs, self.num_prompt_logprobs = num_logprobs, num_prompt_logprobs
        self._sampled: list[IntArray] = []
        self._prompt: dict[int, IntArray] = {}
        self._num_missing = num_prompt_tokens - 1 if num_prompt_logprobs is not None else 0

    @property
    def misses_prompt(self) -> bool:
        """Whether prompt tokens are still to be scored; they must be computed then, and not be found in the cache."""
        return len(self._prompt) < self._num_missing

    def add(self, row_X: IntArray) -> None:
        """Keep the row of the next sampled token."""
        if self.num_logprobs is not None:
            self._sampled.append(row_X.copy())

    def drop_last(self) -> None:
        """Forget the newest sampled token, which is not part of the answer."""
        if self._sampled:
            self._sampled.pop()

    def add_prompt(self, first: int, rows_PX: IntArray) -> None:
        """Keep the rows of the prompt's tokens from position `first` on."""
        self._prompt.update(enumerate(rows_PX.copy(), start=first))

    @property
    def last_logprob(self) -> float | None:
        """The newest token's log-probability; None if not asked for."""
        return _floats(self._sampled[-1][1:2])[0] if self._sampled else None

    def sampled(self, first: int = 0) -> list[TokenLogprob] | None:
        """Log-probabilities of the generated tokens from number `first` on; None if not asked for."""
        if self.num_logprobs is None:
            return None
        return [_read(row, self.num_logprobs) for row in self._sampled[first:]]

    def prompt(self) -> list[TokenLogprob | None] | None:
        """As `sampled`, of every prompt token; None for the first, and for those that were not computed before the end.

        None if not asked for.
        """
        if self.num_prompt_logprobs is None:
            return None
        rows = [self._prompt.get(position) for position in range(1, self._num_missing + 1)]
        return [None, *(None if row is None else _read(row, self.num_prompt_logprobs) for row in rows)]


def _read(row_X: IntArray, num_logprobs: int) -> TokenLogprob:
    count = (len(row_X) - 2) // 2
    ids = row_X[2 : 2 + num_logprobs].tolist()
    values = _floats(row_X[2 + count : 2 + count + num_logprobs])
    return TokenLogprob(int(row_X[0]), _floats(row_X[1:2])[0], tuple(zip(ids, values, strict=True)))


def _floats(bits: IntArray) -> list[float]:
    values: list[float] = bits.astype(np.int32).view(np.float32).tolist()
    return values
