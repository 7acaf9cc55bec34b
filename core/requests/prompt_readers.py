"""What requests want of the hidden states of their prompts, beside or in place of their draws: the host's half.

A request has at most one reader. The ranks' half is `core.worker.results.prompt_readers`; both know readers by the same
index. What a reader makes of prompts travels apart from the draws of a step (`StepResult.apart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hookline.core.errors import HooklineError
from hookline.core.util.arrays import IntArray, TokenArray, VectorArray, no_ints

FIRST_PLUGIN = 8
"""Index of the first reader that is a plugin's; lower ones are core's own, and do not fail for single requests."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A prompt chunk whose hidden states a step has read.

    index: of the reader. first: position of the first token that its rows are about. num_rows: how many rows come of
    this chunk. flags, size, values: for the ranks' half.
    """

    index: int
    first: int
    num_rows: int
    flags: int = 0
    size: int = 0
    values: IntArray = field(default_factory=no_ints)


class PromptReader(Protocol):
    """What one request wants of its prompt's hidden states, and what came of it."""

    @property
    def ends_request(self) -> bool:
        """Whether the request ends with its prompt, so that nothing is drawn for it."""
        ...

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether its prompt must be computed from the first token, and not be found in the cache."""
        ...

    def read(self, tokens_L: TokenArray, start: int, length: int, *, is_last: bool) -> ChunkRead | None:
        """What is read of a chunk of the request's tokens; None if nothing is. is_last: whether it ends the prompt."""
        ...

    def keep(self, chunk: ChunkRead, rows: VectorArray) -> HooklineError | None:
        """Keep the float32 rows that came of a chunk; returns what is wrong with them, if anything is."""
        ...

    def output(self) -> Mapping[str, Any]:
        """Fields of the request's RequestOutput."""
        ...
