"""Repetition, presence and frequency penalties. Legend: N rows, V vocabulary, L tokens of a request.

Repetition looks at prompt and output, as transformers' processor does; presence and frequency at the output alone, as
OpenAI's do. Repetition comes first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec

IN_PROMPT = 1 << 24
"""The weight of a prompt token in a count in which an output token weighs 1, so that one number has both counts."""


class Penalties(LogitsProcessor):
    """Counts a row's tokens anew each step: they are on the device anyway, and a preemption leaves nothing to undo."""

    reads_tokens = True

    def __init__(self, spec: ProcessorSpec) -> None:
        self.fused = _fused() if spec.device.type == "cuda" else None
        self.places_L = torch.arange(spec.max_model_len + 1, device=spec.device)

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """See LogitsProcessor."""
        if self.fused is not None:
            return self.fused(logits_NV, rows)
        counts_NV = self.counts(logits_NV, rows)
        outputs_NV = counts_NV % IN_PROMPT
        repetition_N1, presence_N1, frequency_N1 = (
            rows.columns[f"{name}_penalty"].unsqueeze(1) for name in ("repetition", "presence", "frequency")
        )
        repeated_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
        logits_NV = torch.where(counts_NV > 0, repeated_NV, logits_NV)
        return logits_NV - frequency_N1 * outputs_NV - presence_N1 * (outputs_NV > 0)

    def counts(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """int32 (N, V): how often each token is in the output, plus IN_PROMPT for each time in the prompt."""
        assert rows.tokens_RL is not None and rows.num_prompt_tokens_N is not None
        tokens_NL = rows.tokens_RL[:, : rows.max_num_tokens].index_select(0, rows.rows_N).long()
        places_L = self.places_L[: tokens_NL.shape[1]]
        is_prompt_NL = places_L < rows.num_prompt_tokens_N.unsqueeze(1)
        weights_NL = torch.where(is_prompt_NL, IN_PROMPT, 1) * (places_L < rows.sampling.position_N.unsqueeze(1))
        counts_NV = torch.zeros(logits_NV.shape, dtype=torch.int64, device=logits_NV.device)
        return counts_NV.scatter_add_(1, tokens_NL, weights_NL)


def _fused() -> Callable[[Tensor, LogitsRows], Tensor] | None:
    """The version in two passes; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from hookline.plugins.samplers.penalties_triton import penalize

    return penalize
