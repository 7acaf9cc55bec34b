"""Drafts by an additional layer of the model's own checkpoint: multi-token prediction.

The model's plugin names the layer's tensors (HasDraftHead).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookline.core.contracts import DrafterSpec, DraftTarget, HasDraftHead, ModelSpec
from hookline.core.errors import CheckpointError, ConfigError
from hookline.plugins.drafters.heads import HeadDrafter

if TYPE_CHECKING:
    from hookline.plugins.drafters import MtpConfig


class Mtp(HeadDrafter):
    """See MtpConfig."""

    def __init__(self, config: MtpConfig, spec: DrafterSpec) -> None:
        target = spec.target
        assert target is not None, "drafter=mtp runs in an engine"
        super().__init__(config, spec, target, _head(target), 1)

    @classmethod
    def reads_layers(
        cls, config: MtpConfig, spec: ModelSpec, config_of: Callable[[str], Mapping[str, Any]]
    ) -> Sequence[int]:
        """See Drafter: the model's last layer."""
        return [spec.num_layers - 1]


@torch.inference_mode()
def _head(target: DraftTarget) -> Any:
    """The head of the checkpoint, with its weights."""
    model: Any = target.model_class
    if not hasattr(model, HasDraftHead.draft_head.__name__):
        raise ConfigError(
            f"drafter=mtp: the model plugin {model.__name__} reads no layer of its checkpoints that drafts tokens; "
            "leave the drafter out, or take drafter=suffix"
        )
    try:
        head = model.draft_head()(target.hf_config, target.runtime)
        target.fill(head.weight_targets(target.shapes()))
    except CheckpointError as error:
        raise CheckpointError(f"drafter=mtp cannot read its layer from {target.checkpoint}: {error}") from error
    return head
