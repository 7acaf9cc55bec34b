"""What a caller may ask of a request that is pooled: a vector, not a completion. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookline.core.errors import RequestError, shown

EMBED, CLASSIFY, SCORE = TASKS = ("embed", "classify", "score")
"""What a vector is for: to be compared with others, the logits of classes, or one number that is a score."""
MAX_DIMENSIONS = 2**24
"""Largest `dimensions` that a request may ask for."""


@dataclass(frozen=True)
class PoolingParams:
    """How the hidden states of a prompt become its vector; what is None is the checkpoint's to say.

    Raises: RequestError naming the field, its value and what it may be.
    """

    pooler: str | None = None
    """Name of a pooler, see `hookline info`; None takes the engine's for the task."""
    normalize: bool | None = None
    """Scale the vector to length 1. None: as the checkpoint's modules.json says, and true without that file."""
    dimensions: int | None = None
    """Keep this many of the first numbers, for models trained with Matryoshka loss; the scaling comes after it."""
    task: str = EMBED
    """embed, classify or score: which pooler it is, if none is named."""

    def __post_init__(self) -> None:
        """Check every field."""
        name: Any = self.pooler
        normalize: Any = self.normalize
        size: Any = self.dimensions
        if name is not None and not (isinstance(name, str) and name):
            raise RequestError(f"pooling.pooler={shown(name)} must be the name of a pooler, or None")
        if normalize is not None and not isinstance(normalize, bool):
            raise RequestError(f"pooling.normalize={shown(normalize)} must be true, false or None")
        if self.task not in TASKS:
            raise RequestError(f"pooling.task={shown(self.task)} must be one of {', '.join(TASKS)}")
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (is_whole and 1 <= size <= MAX_DIMENSIONS):
            raise RequestError(f"pooling.dimensions={shown(size)} must be a whole number from 1 to {MAX_DIMENSIONS}")


@dataclass(frozen=True)
class PoolingDefaults:
    """What a checkpoint says of its vectors.

    pooler, normalizes: how its embeddings are made; pooler is a mode of sentence-transformers, None if it names none.
    refusal: why they cannot be made; None if they can. scored_by: the task that tells how well a document answers a
    query: score, classify, or embed, with the cosine of two embeddings.
    """

    pooler: str | None = None
    normalizes: bool = True
    refusal: str | None = None
    scored_by: str = SCORE
