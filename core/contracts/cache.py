"""What each layer of a model keeps of the tokens that it has seen: what a ModelSpec lists, and core makes room for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FullAttention:
    """Keys and values of every token of a sequence."""


@dataclass(frozen=True)
class SlidingWindow:
    """Keys and values of the newest `num_tokens` tokens: a query sees itself and the num_tokens - 1 before it."""

    num_tokens: int


@dataclass(frozen=True)
class SharedCache:
    """No keys and values of its own: the layer attends over those of an earlier one, whose index is `layer`."""

    layer: int


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a sequence's recurrent state in a layer, zeros before its first token.

    shape: of one sequence, on this rank. dtype: name of a torch dtype; empty means that of the model.
    """

    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class RecurrentState:
    """A state of fixed size in place of keys and values, e.g. of a linear attention or a short convolution."""

    tensors: tuple[tuple[str, StateTensor], ...]
    """Names, by which the model finds them, and forms."""


@dataclass(frozen=True)
class NoCache:
    """Nothing: the layer looks at each token alone."""


LayerCache = FullAttention | SlidingWindow | SharedCache | RecurrentState | NoCache
