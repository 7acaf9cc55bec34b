"""A drafter for benchmarks: its drafts are arbitrary tokens, of which steps keep a stated number on average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hookline.core.contracts import Drafter, DrafterSpec, DraftRow
from hookline.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.plugins.drafters import SyntheticConfig


class Synthetic(Drafter):
    """Shows the speed with a drafter of a stated quality, without its weights and without the time of drafting."""

    adaptive = False
    pretended_length: float | None = 3.0

    def __init__(self, config: SyntheticConfig, spec: DrafterSpec) -> None:
        if config.k < 1:
            raise ConfigError(f"drafter.k={config.k} must be at least 1")
        if not 1 <= config.length <= 1 + config.k:
            raise ConfigError(f"drafter.length={config.length} must be from 1 to 1 + drafter.k={1 + config.k}")
        self.k, self.pretended_length, self._vocab_size = config.k, config.length, spec.vocab_size

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter; other tokens at each place, so that experts are chosen as by a text."""
        first = 31 * int(row.tokens[-1]) + 7919 * len(row.tokens)
        return [(first + 104_729 * place) % self._vocab_size for place in range(row.num_drafts)]

    def propose_on_device(self, tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int) -> Tensor:
        """See Drafter."""
        lengths_B = lengths_B.long()
        first_B = 31 * tokens_RL[rows_B, lengths_B - 1].long() + 7919 * lengths_B
        steps_K = torch.arange(num_drafts, device=rows_B.device) * 104_729
        return (first_B.unsqueeze(1) + steps_K) % self._vocab_size
