"""The caches of layers, for the tokens that a model has seen. A ModelSpec lists them; core allocates the memory.

Legend: T tokens of a step, B requests of a step, R rows of a state, one for each request that runs and one for padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class FullAttention:
    """Keys and values of every token of a sequence."""


@dataclass(frozen=True)
class SlidingWindow:
    """Keys and values of the newest `num_tokens` tokens: a query sees itself and the num_tokens - 1 before it."""

    num_tokens: int


@dataclass(frozen=True)
class SharedCache:
    """The layer has no cache: it attends over the keys and values of the earlier layer with the index `layer`.

    It passes its queries alone to `attend`, (T, H * E), and nothing is written to the cache.
    """

    layer: int


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a sequence's recurrent state in a layer, zeros before the sequence's first token.

    shape: for one sequence, in the whole model. dtype: name of a torch dtype; empty means the model's.
    split_dim: the dimension that is divided evenly among the ranks; None if every rank keeps the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: str = ""
    split_dim: int | None = None


@dataclass(frozen=True)
class RecurrentState:
    """A state of fixed size in place of keys and values, e.g. of a linear attention or a short convolution.

    The model reads and writes it through `attend.states(layer)`. Core copies it at the ends of blocks, so that later
    requests can start from a cached prefix; everything that the model remembers of a prefix must be in it.
    """

    tensors: tuple[tuple[str, StateTensor], ...]
    """Pairs of a name, by which the model finds the tensor, and its form."""
    lengths_on_host: bool = False
    """Whether the model reads the lengths of prompts on the host to compute it: no step with prompts is captured then.
    """


@dataclass(frozen=True)
class NoCache:
    """Nothing is cached: the layer looks at each token alone."""


LayerCache = FullAttention | SlidingWindow | SharedCache | RecurrentState | NoCache
"""The cache of one layer; an entry of ModelSpec.layers."""


@dataclass(frozen=True)
class StateRows:
    """The states of one layer and the requests of a step: the result of `attend.states(layer)` in a model's forward.

    tensors: by the names of RecurrentState, each (R, *shape of this rank), to be read and written in place.
    rows_B: (B,) int64, the row of each request; several may name the padding row, whose state belongs to no request.
    query_starts_B1: (B + 1,) int32, the first token of each request; a request without tokens keeps its state.
    is_new_B: (B,) bool, true if the step has the first token of the request; its state is already zero.
    num_decodes: the first requests, one token each. max_query_len: most tokens of a request.
    query_starts_host: query_starts_B1 on the host; None in a captured step with prompts, as kernels that declare
    `graph_prefill` have them. The request of a token must then be computed on the device, from query_starts_B1.
    """

    tensors: Mapping[str, Tensor]
    rows_B: Tensor
    query_starts_B1: Tensor
    is_new_B: Tensor
    num_decodes: int
    max_query_len: int
    query_starts_host: np.ndarray[Any, np.dtype[np.int32]] | None
