"""The host's half of prompt readers, which compute results from the hidden states of prompts: pooling, prompt logprobs.

A request has at most one reader. The ranks' half is `core.worker.results.prompt_readers`; both name readers by the same
index. Results of readers travel apart from the tokens of a step (`StepResult.apart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hookline.core.errors import HooklineError
from hookline.core.util.arrays import IntArray, TokenArray, VectorArray, no_ints

FIRST_PLUGIN = 8
"""Index of the first plugin's reader; readers below it are core's, and do not fail for single requests."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A prompt chunk whose hidden states a step has read.

    index: of the reader. first: position of the first token that its rows are about. num_rows: rows that the reader
    computes of this chunk. flags, size, values: for the ranks' half.
    """

    index: int
    first: int
    num_rows: int
    flags: int = 0
    size: int = 0
    values: IntArray = field(default_factory=no_ints)


class PromptReader(Protocol):
    """The reader of one request's prompt, and its result."""

    @property
    def ends_request(self) -> bool:
        """Whether the request ends with its prompt, so that nothing is drawn for it."""
        ...

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether its prompt must be computed from the first token, without cached prefixes."""
        ...

    def read(self, tokens_L: TokenArray, start: int, length: int, *, is_last: bool) -> ChunkRead | None:
        """What to read of a chunk: tokens `start` to `start + length` of tokens_L (L,); None to read nothing.

        is_last: whether the chunk ends the prompt.
        """
        ...

    def keep(self, chunk: ChunkRead, rows: VectorArray) -> HooklineError | None:
        """Keep the float32 rows (num_rows, X) of a chunk; returns an error if they are unusable, else None."""
        ...

    def output(self) -> Mapping[str, Any]:
        """Fields of the request's RequestOutput."""
        ...
