"""What each draw's hidden states after inner layers would have said, by the model's own last norm and head.

Legend: N draws, D hidden, V vocabulary, K tokens of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import ExtensionSpec, LogitsRows, RequestFacts, StepExtension
from hookline_logitlens import LensArguments


class LogitLens(StepExtension):
    """Tells K, and for each layer its index, the ids of the K likeliest tokens, and their probabilities."""

    reads_texts = True
    result_dtype = "float32"  # exact for token ids below 2**24

    def __init__(self, spec: ExtensionSpec) -> None:
        layers = spec.config.layers or {spec.num_layers // 2, spec.num_layers - 1}
        self.reads_layers = sorted(layers)
        self.most = min(spec.config.most, spec.vocab_size)
        self.result_width = 1 + len(self.reads_layers) * (1 + 2 * self.most)
        assert spec.logits_of is not None
        self.logits_of = spec.logits_of

    def after_draw(self, tokens_N: Tensor, rows: LogitsRows) -> Tensor:
        """One product with the head for each layer."""
        told = [torch.full_like(tokens_N, self.most, dtype=torch.float32).unsqueeze(1)]
        for layer in self.reads_layers:
            logits_NV = self.logits_of(rows.streams[layer])
            top = logits_NV.topk(self.most, dim=1)
            probability_NK = (top.values - logits_NV.logsumexp(1, keepdim=True)).exp()
            told += [torch.full_like(told[0], layer), top.indices.float(), probability_NK]
        return torch.cat(told, dim=1)

    @staticmethod
    def start(arguments: LensArguments, request: RequestFacts) -> Any:
        """How many tokens the request wants of each layer, and the tokenizer for their texts."""
        return arguments.top, request.tokenizer

    @staticmethod
    def on_result(state: Any, values_W: Any) -> list[dict[str, Any]]:
        """For each layer, its likeliest tokens: {"layer": 8, "top": [{"id": 5, "text": " a", "probability": 0.5}]}."""
        (top, tokenizer), count = state, int(values_W[0])
        return [
            {
                "layer": int(block[0]),
                "top": [
                    {"id": int(id_), "text": tokenizer and tokenizer.texts[int(id_)], "probability": float(probability)}
                    for id_, probability in zip(block[1 : 1 + top], block[1 + count : 1 + count + top], strict=True)
                ],
            }
            for block in values_W[1:].reshape(-1, 1 + 2 * count)
        ]
