"""What a caller may ask of a request that is pooled: a vector, not a completion. Knows no torch and no engine."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.errors import RequestError, shown

MAX_DIMENSIONS = 2**24
"""Most numbers of a vector that are believed."""


@dataclass(frozen=True)
class PoolingParams:
    """How the hidden states of a prompt become its vector; what is None is the checkpoint's to say.

    Raises: RequestError naming the field, its value and what it may be.
    """

    pooler: str | None = None
    """Name of a pooler, such as last, mean or cls; None takes the engine's, see the option `pooler`."""
    normalize: bool | None = None
    """Scale the vector to length 1; None does as the checkpoint's modules.json says, and so without one."""
    dimensions: int | None = None
    """Keep so many of the first numbers, for models trained with Matryoshka loss; the scaling comes after it."""

    def __post_init__(self) -> None:
        if self.pooler is not None and not (isinstance(self.pooler, str) and self.pooler):
            raise RequestError(f"pooling.pooler={shown(self.pooler)} must be the name of a pooler, or None")
        if self.normalize not in (None, True, False) or isinstance(self.normalize, float):
            raise RequestError(f"pooling.normalize={shown(self.normalize)} must be true, false or None")
        size = self.dimensions
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_DIMENSIONS
        ):
            raise RequestError(f"pooling.dimensions={shown(size)} must be a whole number from 1 to {MAX_DIMENSIONS}")


@dataclass(frozen=True)
class PoolingDefaults:
    """What a checkpoint says of its vectors.

    pooler, normalizes: how its embeddings are made. refusal: why they cannot be; None if they can. scorer: what tells
    how well a document answers a query: pooler yes_no or classify, or "cosine" of two embeddings.
    """

    pooler: str = "last"
    normalizes: bool = True
    refusal: str | None = None
    scorer: str = "yes_no"
