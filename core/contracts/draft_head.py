"""The contract of drafting heads, which guess tokens from the hidden states of the model.

A head is a small network of a single layer with its own KV cache. Its entry i is computed of the model's hidden
states at position i and of the token at i + 1, and guesses the token at i + 2; further guesses are made of the head's
own hidden states in place of the model's.
Legend: T entries, N rows whose logits are wanted, D hidden of the model, H hidden of the head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.model import Attend, ModelSpec, Runtime

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.core.contracts.weights import WeightTarget

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint, by its name."""


class DraftHead(Protocol):
    """A head. Constructed as `Head(hf_config, runtime)`; parameters are left uninitialised, as a model's are."""

    spec: ModelSpec
    """Its own sizes, of one layer: heads, head_dim, value_dim."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        """Allocate the parameters on runtime.device. `runtime` has a single rank.

        Raises: ConfigError for a config.json that it cannot be built for.
        """
        ...

    def weight_targets(self, stored: Shapes) -> Mapping[str, WeightTarget]:
        """Name of each checkpoint tensor that the head needs -> the parameter that it fills.

        stored: the checkpoint's tensors and their shapes; empty if weights are random.
        Raises: CheckpointError, in one line, if the checkpoint holds no such head.
        """
        ...

    def combine(self, streams: Sequence[Tensor]) -> Tensor:
        """The input of `forward` for T entries: the model's residual streams (T, D), by layer ascending -> (T, H)."""
        ...

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, hidden_TH: Tensor, attend: Attend) -> Tensor:
        """Compute T entries: hidden_TH (T, H), from `combine` or from this method for the entry before -> (T, H).

        attend: called once, with any layer.
        """
        ...

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """The logits of guesses: rows that `forward` returned (N, H) -> (N, V), -inf for tokens it cannot guess."""
        ...


class HasDraftHead(Protocol):
    """A model class whose checkpoints may carry a drafting head. It has this method besides Model's."""

    @classmethod
    def draft_head(cls) -> type[DraftHead]:
        """The class of the head; it reads the residual stream after the last layer."""
        ...
