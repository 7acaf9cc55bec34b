"""Poolers that read a few numbers off the last token's hidden state through a head: classes, or yes against no.

Legend: as in core/contracts/pooler.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import PoolerSpec
from hookline.core.errors import ConfigError, shown
from hookline.plugins.poolers.tokens import LastToken


class LastTokenHead(LastToken):
    """Base of poolers that make a few numbers of the last token's hidden state."""

    def __init__(self, config: Any, spec: PoolerSpec) -> None:
        super().__init__(config, spec)
        self.config, self.spec = config, spec


class ClassLogits(LastTokenHead):
    """Logits of the classes: transformers' ForSequenceClassification, whose head is the tensor score.weight."""

    task = "classify"

    def __init__(self, config: Any, spec: PoolerSpec) -> None:
        super().__init__(config, spec)
        self.weight_FD = spec.model.weight("score.weight", (num_classes(spec), spec.hidden_size))

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        """Logits of the classes, (B, classes); no softmax."""
        return functional.linear(state_BS, self.weight_FD)


class YesNo(LastTokenHead):
    """The probability of yes, where the next token is yes or no."""

    task = "score"

    def __init__(self, config: Any, spec: PoolerSpec) -> None:
        super().__init__(config, spec)
        ids = [_one_token(spec, name, text) for name, text in (("no", config.no), ("yes", config.yes))]
        self.ids_2 = torch.tensor(ids, device=spec.device)

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        """The softmax of the two tokens' logits, of which that of yes: (B, 1)."""
        logits_BV = self.spec.model.logits(state_BS)
        return logits_BV.index_select(1, self.ids_2).float().softmax(1)[:, 1:]


def num_classes(spec: PoolerSpec) -> int:
    """As transformers reads it from a config.json: num_labels, else as many as have a name, else two."""
    names = spec.hf_config.get("id2label") or {0: "", 1: ""}
    count = spec.hf_config.get("num_labels", len(names))
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 2**20:
        raise ConfigError(f"the checkpoint's num_labels = {shown(count)} is no number of classes")
    return count


def _one_token(spec: PoolerSpec, name: str, text: str) -> int:
    ids = spec.model.token_ids(text)
    if len(ids) != 1:
        raise ConfigError(f"pooler.{name}={shown(text)} is {len(ids)} tokens of this tokenizer; it must be one")
    return ids[0]
