"""A causal language model of the text part of a model that also sees, where transformers has only the part's body.

Legend: N rows whose logits are wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

TEXT_PART = "_text"
"""Suffix of a text part's model_type, behind the whole model's."""


class TextWithHead:
    """Marks the classes that `with_head` makes."""


@lru_cache
def with_head(body_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of the body, in `model`, and a linear head, in `lm_head`; tied if the config says so."""
    family: Any = next(one for one in body_class.__mro__[1:] if issubclass(one, PreTrainedModel))

    class Causal(TextWithHead, family):  # type: ignore[misc]
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as transformers has it
        _keys_to_ignore_on_load_unexpected = body_class._keys_to_ignore_on_load_unexpected

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = body_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, input_ids: Tensor | None = None, **options: Any) -> CausalLMOutputWithPast:
            hidden_1ND = self.model(input_ids=input_ids, **options)[0]
            logits_1NV = self.lm_head(hidden_1ND)
            scaling = getattr(self.config, "logits_scaling", None)  # Granite's
            return CausalLMOutputWithPast(logits=logits_1NV / scaling if scaling else logits_1NV)

    Causal.__name__ = f"{body_class.__name__}WithHead"
    return Causal
