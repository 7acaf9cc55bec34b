"""What drafters have that read the hidden states of the model: heads, which guess a token from them.

A head is a small network of a single layer with a KV cache of its own. Its entry i is computed of the model's hidden
states at position i and of the token at i + 1, and guesses the token at i + 2; further guesses are made of the head's
own hidden states in place of the model's.
Legend: T entries, N rows whose logits are wanted, D hidden of the model, H hidden of the head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.model import Attend, ModelSpec, Runtime

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hookline.core.contracts.drafter import DraftRow
    from hookline.core.contracts.weights import WeightTarget

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint, by its name."""


class DraftHead(Protocol):
    """A head. Constructed as `Head(hf_config, runtime)`; parameters are left uninitialised, as a model's are."""

    spec: ModelSpec
    """Its own sizes, of one layer: heads, head_dim, value_dim."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        """Allocate the parameters on runtime.device; the ranks of `runtime` are one.

        Raises: ConfigError for a config.json that it cannot be built for.
        """
        ...

    def weight_targets(self, stored: Shapes) -> Mapping[str, WeightTarget]:
        """Name of each tensor that it needs -> where that goes.

        stored: what the checkpoint has; empty if weights are random.
        Raises: CheckpointError, in one line, if the checkpoint holds no such head.
        """
        ...

    def combine(self, streams: Sequence[Tensor]) -> Tensor:
        """What an entry is made of: the model's residual streams (T, D), by layer ascending -> (T, H)."""
        ...

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, hidden_TH: Tensor, attend: Attend) -> Tensor:
        """Entries: hidden_TH of `combine`, or of this method for the entry before -> (T, H).

        attend: called once, with any layer.
        """
        ...

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """What guesses are drawn of: rows that `forward` returned (N, H) -> (N, V), -inf where it cannot guess."""
        ...


class HasDraftHead(Protocol):
    """What a model class has besides Model's methods if its checkpoints may carry a head that guesses tokens."""

    @classmethod
    def draft_head(cls) -> type[DraftHead]:
        """The class of the head; it reads the residual stream after the last layer."""
        ...


class DraftTarget(Protocol):
    """The model that drafts are for, as drafters see it.

    spec, hf_config, model_class: of the model. checkpoint: what its checkpoint is called. is_random: whether its
    weights are drawn at random, as those of its head then are.
    """

    spec: ModelSpec
    hf_config: Mapping[str, Any]
    model_class: type
    checkpoint: str
    is_random: bool

    def config_of(self, checkpoint: str) -> Mapping[str, Any]:
        """The config.json of another checkpoint, a folder or a hub id. Raises: CheckpointError."""
        ...

    def shapes(self, checkpoint: str = "") -> Shapes:
        """The tensors of the model's checkpoint, or of another one; empty if weights are random.

        Raises: CheckpointError.
        """
        ...

    @property
    def runtime(self) -> Runtime:
        """What a head is built with, whole in the engine's process: the model's device, dtype and kernels, and the
        quantization of its checkpoint.
        """
        ...

    def fill(self, targets: Mapping[str, WeightTarget], checkpoint: str = "") -> None:
        """Load weights from the model's checkpoint, drawn at random where its are, or plain ones from another one.

        Raises: CheckpointError for tensors that are missing or misshaped.
        """
        ...

    def draw(self, logits_NV: Tensor, rows: Sequence[DraftRow], ahead: int) -> list[int]:
        """Draw with the requests' temperatures and noise the token that is `ahead` behind their last one, from 1.

        NO_TOKEN where logits hold NaN.
        """
        ...


@dataclass(frozen=True)
class ComputedRow:
    """The tokens of one request that a step computed and that count: those of wrong drafts are left out.

    id, tokens: as in DraftRow; of tokens at least one follows the computed ones. start: position of the first computed
    token. streams: for each layer of `Drafter.reads_layers`, the residual stream after it (T, D) float32, which the
    drafter may keep.
    """

    id: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    start: int
    streams: Mapping[int, np.ndarray[Any, np.dtype[np.float32]]]
