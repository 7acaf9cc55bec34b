"""Attention of transformers' models by core's paged Attend, and the attention sizes and features of each layer.

transformers calls the function that is registered under the name in the config's `_attn_implementation`; this one
passes queries, keys and values, rotated already, to the module's `hookline_attention`. No mask is ever built: the name
for serving has no mask function in transformers. The name for probing has one, which finds out the kind of mask.
Legend: T tokens, H heads, K kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    Attend,
    AttentionForm,
    FullAttention,
    LayerCache,
    Ranks,
    SlidingWindow,
)
from hookline.plugins.models.transformers.alibi import SLOPES, digit_weights, digits
from hookline.plugins.models.transformers.chunks import Temperature, in_chunks, parities, temperatures
from hookline.plugins.models.transformers.states import LayerStates, ServedStates, StateCache

SERVED, PROBED = "hookline", "hookline_probed"
"""Names of attention implementations, as transformers' configs have them."""


@dataclass(frozen=True)
class LayerAttention:
    """How one layer attends; counts are of all ranks together.

    A layer with fewer kv heads or a smaller head dim than others of its model is padded to theirs: each kv head is used
    several times, and zeros follow keys and values, as they follow the narrower of keys and values that are unlike.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    form: AttentionForm = PLAIN_ATTENTION
    """Scale and cap; the module passes its sinks in each call."""
    has_sinks: bool = False
    kv_copies: int = 1
    """How many of the kv heads are copies of one kv head of this layer."""
    chunk: int | None = None
    """Tokens of a chunk, for a layer whose queries see their own chunk alone; its window has as many."""
    temperature: Temperature | None = None
    """How queries are scaled by position."""

    @property
    def cache(self) -> LayerCache:
        """The entry of ModelSpec.layers."""
        return FullAttention() if self.window is None else SlidingWindow(self.window)


@dataclass(frozen=True)
class Mask:
    """Replaces the mask that a probed model would have built. window: tokens that a query sees; None for all.

    is_chunked: whether a query sees only tokens of its own chunk of `window` positions, up to its own position.
    """

    window: int | None
    fault: str | None = None
    is_chunked: bool = False
    ndim: int = 0
    """Falcon writes biases into masks of four dimensions."""

    def __getitem__(self, part: Any) -> Mask:
        """The mask of some of the queries."""
        return self


class PagedAttention:
    """The attention and the states of one served model: core's Attend, layer after layer in the order of the calls."""

    def __init__(
        self, layers: tuple[LayerAttention | LayerStates, ...], ranks: Ranks, cache: StateCache | None
    ) -> None:
        self.layers, self.ranks, self.states = layers, ranks, ServedStates(cache)
        self.attend: Attend | None = None
        self.next_layer = 0
        self.positions_T: Tensor | None = None
        self.weights_HP: Tensor | None = None
        self.digits_TP: Tensor | None = None
        self.parities: dict[int, Tensor] = {}

    def begin(self, attend: Attend, positions_T: Tensor) -> None:
        """Begin a forward of tokens at these positions; the following calls belong to it."""
        self.attend, self.next_layer = attend, 0
        self.positions_T, self.digits_TP, self.parities = positions_T, None, {}
        self.states.begin()

    def with_states(self, own: Callable[..., Any], args: Any, options: Any) -> Any:
        """Call the original forward of a module that keeps a state, with its arguments."""
        layer, index = self.layers[self.next_layer], self.next_layer
        self.next_layer += 1
        assert self.attend is not None and isinstance(layer, LayerStates)
        return self.states.compute(layer, self.attend.states(index), own, args, options)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None = None,
        *,
        options: Mapping[str, Any],
        **_: Any,
    ) -> Tensor:
        """Attend: (1, H, T, E), (1, K, T, E) twice -> (1, T, H, E). The heads are this rank's, or all of them.

        K and E may be less than the layer's; the result is as wide as the values.
        """
        layer, index = self.layers[self.next_layer], self.next_layer
        assert isinstance(layer, LayerAttention)
        self.next_layer += 1
        is_whole = self.ranks.size > 1 and query.shape[1] == layer.num_heads
        width, copies = value.shape[-1], layer.kv_copies
        if layer.temperature is not None:
            assert self.positions_T is not None
            query = (query * temperatures(self.positions_T, layer.temperature)[:, None]).to(query.dtype)
        if layer.chunk is not None:
            query, key = in_chunks(query, key, self._parities(layer.chunk, key.dtype), layer.form.scale or 1.0)
        if SLOPES in options:
            query, key = self._with_positions(query, key, options[SLOPES], layer.form.scale or 1.0)
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        if is_whole:
            query, key, value = self._own(query, layer.num_heads), self._own(key), self._own(value)
        query, key, value = (_widened(one, layer.head_dim) for one in (query, key, value))
        form = layer.form
        if sinks_H is not None:
            own_H = self._own(sinks_H, layer.num_heads, 0) if len(sinks_H) != query.shape[1] else sinks_H
            form = AttentionForm(form.scale, form.softcap, own_H)
        qkv_TC = torch.cat([one[0].transpose(0, 1).flatten(1) for one in (query, key, value)], dim=1)
        assert self.attend is not None
        forms = () if form is PLAIN_ATTENTION else (None, form)
        out_TC = self.attend(index, qkv_TC, None, *forms)
        if is_whole:
            out_TC = self.ranks.all_gather_last(out_TC)
        return out_TC.view(1, out_TC.shape[0], -1, layer.head_dim)[..., :width]

    def _parities(self, chunk: int, dtype: torch.dtype) -> Tensor:
        """See chunks.parities."""
        if chunk not in self.parities:
            assert self.positions_T is not None
            self.parities[chunk] = parities(self.positions_T, chunk, dtype)
        return self.parities[chunk]

    def _with_positions(
        self, query: Tensor, key: Tensor, slopes: tuple[float, ...], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, whose scores have a bias of ALiBi then."""
        if self.weights_HP is None:
            self.weights_HP = digit_weights(slopes, scale, query)
        if self.digits_TP is None:
            assert self.positions_T is not None
            self.digits_TP = digits(self.positions_T).to(key.dtype)
        of_queries = self.weights_HP[None, :, None].expand(-1, -1, query.shape[2], -1)
        of_keys = self.digits_TP.expand(1, key.shape[1], -1, -1)
        return torch.cat((query, of_queries), -1), torch.cat((key, of_keys), -1)

    def _own(self, whole: Tensor, num_heads: int | None = None, dim: int = 1) -> Tensor:
        """This rank's heads; kv heads are replicated if the ranks exceed them."""
        rank, size, count = self.ranks.rank, self.ranks.size, whole.shape[dim] if num_heads is None else num_heads
        first = rank * count // size
        return whole.narrow(dim, first, max(1, count // size))


def _widened(heads: Tensor, head_dim: int) -> Tensor:
    """The heads with zeros behind their numbers: (..., E) -> (..., head_dim); not copied where E is that."""
    return heads if heads.shape[-1] == head_dim else pad(heads, (0, head_dim - heads.shape[-1]))


def alike(layers: list[LayerAttention]) -> list[LayerAttention]:
    """The same layers, all with the largest number of kv heads and the largest head dim among them.

    Raises: ValueError if their numbers of heads are unlike, or kv heads do not divide.
    """
    num_kv_heads = max((layer.num_kv_heads for layer in layers), default=1)
    head_dim = max((layer.head_dim for layer in layers), default=1)
    if len({layer.num_heads for layer in layers}) > 1 or any(num_kv_heads % layer.num_kv_heads for layer in layers):
        raise ValueError
    return [
        replace(
            layer,
            num_kv_heads=num_kv_heads,
            kv_copies=num_kv_heads // layer.num_kv_heads,
            head_dim=head_dim,
            form=replace(layer.form, scale=layer.form.scale or layer.head_dim**-0.5)
            if layer.head_dim < head_dim
            else layer.form,
        )
        for layer in layers
    ]


def attach(model: nn.Module, attention: Callable[..., Tensor]) -> None:
    """Let all attention of a model go through this."""
    for module in model.modules():
        module.hookline_attention = attention  # type: ignore[assignment]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls."""
    attend: Any = module.hookline_attention
    sinks = options.get("s_aux")
    return attend(query, key, value, sinks, module=module, mask=attention_mask, options=options), None


def _no_mask(*_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any) -> Mask:
    """Find out what a mask would hide, by asking its function about a few pairs of positions."""
    size = local_size or 1
    queries = (3,) if local_size is None else (2 * size, 3 * size - 1, 2 * size + 3)
    firsts = {
        "all": dict.fromkeys(queries, 0),
        "window": {query: query - size + 1 for query in queries},
        "chunk": {query: query // size * size for query in queries},
    }
    for kind in ("all",) if local_size is None else ("window", "chunk"):
        try:
            if all(_sees(mask_function, query, first) for query, first in firsts[kind].items()):
                return Mask(local_size, is_chunked=kind == "chunk")
        except Exception:
            return Mask(local_size, "it uses a mask of its own making")
    return Mask(local_size, "its mask is neither causal, nor a sliding window, nor one of chunks")


def _sees(mask_function: Callable[..., Any], query: int, first: int) -> bool:
    """Whether a query sees exactly the keys from `first` to its own; only the ends of the range are tested."""
    pairs = {first - 1: False, first: True, query: True, query + 1: False}
    zero = torch.zeros((), dtype=torch.long)
    return all(
        bool(mask_function(zero, zero, zero + query, zero + key)) == seen for key, seen in pairs.items() if key >= 0
    )


for _name in (SERVED, PROBED):
    AttentionInterface.register(_name, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _no_mask)
