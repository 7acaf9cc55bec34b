"""Runs one logits processor without an engine, through the same host and device halves as the engine does.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hookline.core.contracts import TokenTexts
from hookline.core.plugin.registry import PROCESSOR
from hookline.core.testing.extension_driver import LOGPROB as LOGPROB
from hookline.core.testing.extension_driver import NUM_ROWS as NUM_ROWS
from hookline.core.testing.extension_driver import Asked as Asked
from hookline.core.testing.extension_driver import ExtensionDriver


class ProcessorDriver(ExtensionDriver):
    """A processor with rows for a few requests. Arguments from SamplingParams are given under SamplingParams' names."""

    def __init__(
        self,
        processor: Any,
        config: type,
        vocab_size: int,
        device: str = "cpu",
        tokenizer: TokenTexts | None = None,
    ) -> None:
        super().__init__(processor, config, vocab_size, device, tokenizer, kind=PROCESSOR)

    def process(self, logits_NV: Tensor, rows: Sequence[int]) -> Tensor:
        """The logits of one draw for each of these rows, in this order; rows never admitted count as padding."""
        return self.step(rows, logits_NV).logits_NV
