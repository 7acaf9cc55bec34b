"""RWKV's states, which its layers share in one list of five tensors, as those of each layer in transformers' cache.

Legend: B requests, T tokens, D hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookline.plugins.models.transformers.states import HAS_STATES, RECURRENT, Place, StateCache

NUM_STATES = 5
"""Of each layer: the last token of both parts; a numerator, a denominator and the maximum that both are scaled by."""
NUM_TOKENS, DENOMINATOR, MAXIMUM = 2, 3, 4
LEAST = -1e30
"""The maximum before the first token."""


def serve_rwkv(model: nn.Module) -> None:
    """Let RWKV's decoder take a cache of states, and divide outputs of its layers where it would change weights.

    It halves its hidden states every few layers, and divides what the following layers add to them by as much.
    """
    decoder: Any
    for decoder in model.modules():
        if type(decoder).__name__ != "RwkvModel" or not HAS_STATES:
            continue
        config, decoder.layers_are_rescaled = decoder.config, True
        config.layer_types, config.number_of_conv_states = ["linear_attention"] * config.num_hidden_layers, NUM_STATES
        decoder.forward = partial(_forward, decoder, decoder.forward)
        for index, block in enumerate(decoder.blocks):
            scale = 2.0 ** (index // config.rescale_every) if config.rescale_every > 0 else 1.0
            for part in (block.attention, block.feed_forward):
                part.register_forward_hook(partial(_divided, scale))


def _forward(decoder: Any, own: Any, input_ids: Tensor, *, cache: StateCache, **options: Any) -> Any:
    weight_VD = decoder.embeddings.weight
    return own(input_ids, state=[_Column(cache, index, weight_VD) for index in range(NUM_STATES)], **options)


def _divided(scale: float, _module: nn.Module, _given: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0] / scale, output[1]


class _Column:
    """One of the five tensors: column[:, :, layer] is the state of a layer in the cache.

    Shapes: (B, D); of the last tokens (B, 1, D), since RWKV adds them to its inputs. like: of the model's dtype.
    """

    def __init__(self, cache: StateCache, index: int, like: Tensor) -> None:
        self.cache, self.index, self.like = cache, index, like

    def __getitem__(self, key: tuple[slice, slice, int]) -> Tensor:
        state_BD = self._state(key[-1], self.index)
        if self.index < NUM_TOKENS:
            return state_BD[:, None]
        if self.index == MAXIMUM:  # core keeps zeros before the first token, after which no denominator is zero
            return state_BD.masked_fill(self._state(key[-1], DENOMINATOR) == 0, LEAST)
        return state_BD

    def __setitem__(self, key: tuple[slice, slice, int], state_BD: Tensor) -> None:
        self.cache.update_recurrent_state(state_BD, key[-1], self.index)

    def _state(self, layer: int, index: int) -> Tensor:
        self.cache.get_recurrent_state(layer, index)
        state_BD = self.cache.get(Place(layer, RECURRENT, index))
        if state_BD is None:  # in a forward without data
            dtype = self.like.dtype if index < NUM_TOKENS else torch.float32
            state_BD = self.like.new_zeros(1, self.like.shape[-1], dtype=dtype)
            self.cache.put(Place(layer, RECURRENT, index), state_BD, has_tokens=False)
        return state_BD
