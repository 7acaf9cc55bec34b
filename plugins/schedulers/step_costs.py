"""Learns the cost of steps: seconds by the number of decoding rows, their context and prompt tokens.

The cost of decodes is linear in rows and in the tokens that they read. The cost of prompts is a table by size, because
small captured steps, steps limited by their launch and large steps have different costs per token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hookline.core.contracts import CommittedStep

FORGETTING = 0.98
"""Weight of a decode step relative to the next one in the fit."""
RECENT = 0.2
"""Weight of the newest step in the mean of its size."""
MOST_SURPRISE = 3.0
"""A step counts at most as this many times the expected time, because the time of a step that compiled a kernel says
nothing of other steps."""
FIRST_STEPS = 2
LAST_STEPS = 9
REFIT_STEPS = 8
LEAST_TOKENS = 32
"""Smallest size of prompt steps, in tokens; each further size is twice as large."""
WORTH = 1.3
"""A larger size must be this many times cheaper per token to be preferred: smaller steps answer sooner."""
STALE_STEPS = 2000
"""Steps with prompts after which the cost of an unused size counts as unknown."""


@dataclass
class _Mean:
    """Means of the last steps of one size. at: number of the latest of these steps. count: how many there were."""

    tokens: float
    seconds: float
    at: int
    count: int = 1


class PromptCosts:
    """Seconds of steps by their prompt tokens, a mean for each size."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._num_steps = 0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Note the duration of a step of this many prompt tokens."""
        self._num_steps += 1
        size = size_of(num_tokens)
        mean = self._means.get(size)
        if mean is None or self._is_stale(mean) or seconds < mean.seconds / MOST_SURPRISE:
            count = 0 if mean is None or self._is_stale(mean) else mean.count
            self._means[size] = _Mean(num_tokens, seconds, self._num_steps, count + 1)
            return
        seconds = min(seconds, MOST_SURPRISE * mean.seconds)
        mean.tokens += RECENT * (num_tokens - mean.tokens)
        mean.seconds += RECENT * (seconds - mean.seconds)
        mean.at, mean.count = self._num_steps, mean.count + 1

    def is_known(self, num_tokens: int) -> bool:
        """Whether the cost of that size is known: more than one recent step, because the first may have compiled a
        kernel.
        """
        return self._known(size_of(num_tokens)) is not None

    def seconds(self, num_tokens: int) -> float:
        """Seconds that this many tokens will take; 0 as long as nothing is known."""
        size = size_of(num_tokens)
        known = [one for one in self._means if self._known(one) is not None]
        if not known:
            return 0.0
        larger = [one for one in known if one >= size]
        nearest = self._means[min(larger) if larger else max(known)]
        return nearest.seconds * max(1.0, num_tokens / nearest.tokens)

    def best_size(self, limit: int) -> int | None:
        """The smallest size whose cost per token is about the lowest; None as long as no cost is known."""
        prices = {
            size: self._means[size].seconds / self._means[size].tokens
            for size in sorted(self._means)
            if size <= limit and self._known(size) is not None
        }
        if not prices:
            return None
        best = min(prices.values())
        return next(size for size, price in prices.items() if price <= WORTH * best)

    def price_s(self, size: int) -> float:
        """Seconds for each token of steps of that size."""
        return self.seconds(size) / size

    def _known(self, size: int) -> _Mean | None:
        mean = self._means.get(size)
        return None if mean is None or mean.count < 2 or self._is_stale(mean) else mean

    def _is_stale(self, mean: _Mean) -> bool:
        return self._num_steps - mean.at > STALE_STEPS


class DecodeCosts:
    """Seconds of decode steps: a part for the step, one for each row, and one for each token read."""

    def __init__(self) -> None:
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)
        self._solution = (0.0, 0.0, 0.0)
        self._context_per_row = 0.0
        self._num_steps = 0
        self._last_s: deque[float] = deque(maxlen=LAST_STEPS)

    @property
    def is_known(self) -> bool:
        """Whether costs of decodes are known: more than the first steps, which may have compiled kernels."""
        return self._num_steps > FIRST_STEPS

    def learn(self, num_rows: int, num_context_tokens: int, seconds: float) -> None:
        """Note the duration of a step of this many decodes, which read this many tokens."""
        self._num_steps += 1
        if not self.is_known:
            return
        self._context_per_row = num_context_tokens / num_rows
        self._last_s.append(seconds)
        seconds = min(seconds, MOST_SURPRISE * min(self._last_s))
        features = np.array((1.0, num_rows / 100, num_context_tokens / 1e5))
        self._squares = FORGETTING * self._squares + np.outer(features, features)
        self._products = FORGETTING * self._products + features * seconds
        if self._num_steps < FIRST_STEPS + REFIT_STEPS or self._num_steps % REFIT_STEPS == 0:
            self._fit()

    def _fit(self) -> None:
        """Solve the least squares, slightly damped and without negative costs."""
        solved = np.linalg.solve(self._squares + 1e-3 * np.eye(3), self._products)
        step_s, row_s, token_s = np.maximum(solved, 0.0) / (1.0, 100.0, 1e5)
        self._solution = float(step_s), float(row_s), float(token_s)

    @property
    def row_s(self) -> float:
        """Seconds for another row that reads as many tokens as the other rows on average."""
        _, row_s, token_s = self._solution
        return row_s + token_s * self._context_per_row

    def seconds(self, num_rows: int) -> float:
        """Seconds for this many rows, each with as much to read as rows of the last step; 0 while no cost is known."""
        return self._solution[0] + self.row_s * num_rows if num_rows else 0.0


class Throughput:
    """Learns how fast prompts are computed while some wait, including the work in between, and how long
    a step takes.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self._seconds, self._tokens = 0.0, 0.0

    @property
    def token_s(self) -> float:
        """Seconds for each prompt token; 0 as long as nothing is known."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Note the duration of a step and its prompt tokens."""
        if not self.step_s or seconds < self.step_s / MOST_SURPRISE:
            self.step_s = seconds
        self.step_s += RECENT * (min(seconds, MOST_SURPRISE * self.step_s) - self.step_s)
        self._seconds = FORGETTING * self._seconds + min(seconds, MOST_SURPRISE * self.step_s)
        self._tokens = FORGETTING * self._tokens + num_tokens


class StepCosts:
    """The costs of an engine's steps. prompts: of steps with prompts alone. mixed: the additional seconds of prompts in
    a step with decodes.
    """

    def __init__(self) -> None:
        self.decodes, self.prompts, self.mixed = DecodeCosts(), PromptCosts(), PromptCosts()
        self.throughput = Throughput()

    def learn(self, step: CommittedStep, *, is_backlogged: bool) -> None:
        """Note a committed step, and whether prompts waited meanwhile."""
        num_rows, num_tokens = step.num_decodes, step.num_prefill_tokens
        if num_rows and num_tokens:
            self.mixed.learn(num_tokens, max(0.0, step.step_s - self.decodes.seconds(num_rows)))
        elif num_rows:
            self.decodes.learn(num_rows, step.num_context_tokens, step.step_s)
        elif num_tokens:
            self.prompts.learn(num_tokens, step.step_s)
        if is_backlogged:
            self.throughput.learn(num_tokens, step.step_s)


def size_of(num_tokens: int) -> int:
    """The size that a number of tokens belongs to: the next power of two."""
    return max(LEAST_TOKENS, 1 << (num_tokens - 1).bit_length())
