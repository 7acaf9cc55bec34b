"""ALiBi: scores with a bias that is linear in positions, for Bloom, MPT and Falcon, by kernels without support for it.

Softmax does not change if a number is added to all scores of a query, so slope * (position of the key) serves as the
bias. It is a product of further numbers of the query, slope * 16**i, and of the key, the digits of its position to base
16, which every dtype of a cache holds exactly. Legend: T tokens, D hidden, H heads, E head dim, P digits.
Source: Press et al. 2021, arXiv:2108.12409.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BASE, NUM_DIGITS = 16, 4
MAX_POSITIONS = BASE**NUM_DIGITS
"""Tokens of the longest sequence whose positions can be told apart."""
SLOPES = "alibi_slopes"
"""The argument of an attention call that has a slope for each head: a tuple of numbers."""


def widened(head_dim: int, num_more: int = NUM_DIGITS) -> int:
    """The head dim with room for num_more further numbers: a multiple of 16, beyond 128 of 32, as kernels need it."""
    needed = head_dim + num_more
    unit = 16 if needed <= 128 else 32
    return -(-needed // unit) * unit


def digits(positions_T: Tensor) -> Tensor:
    """The digits of positions: (T,) -> (T, P) int64, the lowest first."""
    return torch.stack([positions_T // BASE**place % BASE for place in range(NUM_DIGITS)], 1)


def digit_weights(slopes: tuple[float, ...], scale: float, like: Tensor) -> Tensor:
    """Each head's query values for the digits in the keys, if scores are multiplied by `scale`: (H, P)."""
    rows = [[slope / scale * BASE**place for place in range(NUM_DIGITS)] for slope in slopes]
    return torch.tensor(rows, dtype=like.dtype, device=like.device)


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """The slopes of Bloom's and Falcon's heads: powers of two; heads beyond a power of two get values in between."""
    known = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8 * (head + 1) / known) for head in range(known)]
    return (*first, *(2.0 ** (-4 * (2 * head + 1) / known) for head in range(num_heads - known)))


def mpt_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of MPT's heads: of every second one of twice as many first, if they are no power of two."""
    known = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (head + 1) / known) for head in range(known)]
    return tuple(slopes if known == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads])


def serve_alibi(model: nn.Module, attention: Callable[..., Any]) -> None:
    """Let the attention of Bloom's and MPT's layers, whose own takes no other, go through this function."""
    module: Any
    for module in model.modules():
        served = _SERVED.get(type(module).__name__)
        if served is not None:
            module.forward = partial(served, module, attention)


def needs_no_positions(decoder: nn.Module) -> bool:
    """Whether a decoder takes no positions because its attention's biases are all that depends on them."""
    return any(type(module).__name__ in _SERVED for module in decoder.modules())


def _bloom_attention(
    layer: Any, attention: Callable[..., Any], hidden_1TD: Tensor, residual_1TD: Tensor, **given: Any
) -> tuple[Tensor, None]:
    heads = layer._reshape(layer.query_key_value(hidden_1TD))
    slopes = {SLOPES: slopes_of(layer.num_heads)}
    out_1THE, _ = attention(layer, *heads, given["attention_mask"], scaling=layer.inv_norm_factor, **slopes)
    return layer.dense(out_1THE.flatten(2)) + residual_1TD, None


def _mpt_attention(layer: Any, attention: Callable[..., Any], hidden_1TD: Tensor, **given: Any) -> tuple[Tensor, None]:
    qkv_1TC = layer.Wqkv(hidden_1TD)
    if layer.clip_qkv:
        qkv_1TC = qkv_1TC.clamp(-layer.clip_qkv, layer.clip_qkv)
    parts = (one.unflatten(-1, (layer.n_heads, layer.head_dim)).transpose(1, 2) for one in qkv_1TC.chunk(3, 2))
    slopes = {SLOPES: mpt_slopes(layer.n_heads)}
    out_1THE, _ = attention(layer, *parts, given["attention_mask"], scaling=layer.softmax_scale, **slopes)
    return layer.out_proj(out_1THE.flatten(2)), None


def _mpt_decoder(decoder: Any, _: Any, input_ids: Tensor, **__: Any) -> tuple[Tensor]:
    """MPT's own forward makes a mask and a table of biases, which nothing here reads."""
    hidden_1TD = decoder.wte(input_ids)
    for block in decoder.blocks:
        hidden_1TD = block(hidden_1TD, position_bias=None, attention_mask=None)[0]
    return (decoder.norm_f(hidden_1TD),)


_SERVED: dict[str, Callable[..., Any]] = {
    "BloomAttention": _bloom_attention,
    "MptAttention": _mpt_attention,
    "MptModel": _mpt_decoder,
}
