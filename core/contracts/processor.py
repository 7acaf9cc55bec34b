"""Logits processors: step extensions that only change logits. Legend: N rows of a call, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hookline.core.contracts.extension import ExtensionSpec, LogitsRows, StepExtension

if TYPE_CHECKING:
    from torch import Tensor

ProcessorSpec = ExtensionSpec
"""The argument that a logits processor is constructed with."""


class LogitsProcessor(StepExtension, Protocol):
    """Changes logits before the sampler draws, for the requests that ask for it. For classes to extend.

    A step extension whose `before_draw` is called `process`, with all that step extensions have. It is registered by
    register_processors with a dataclass, `config=`, whose fields are a request's arguments and whose defaults mean
    "leave the logits alone".
    """

    draw_method: str = "process"
    """See StepExtension."""

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """See StepExtension.before_draw."""
        ...
