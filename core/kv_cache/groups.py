"""The groups of layers that share blocks of the KV cache, and the place of each layer's keys and values in a block.

Layers of one kind are divided into groups of at most `num_places`; place i of a block belongs to the i-th layer of the
group that holds the block. So all blocks have the same size, one pool serves every group, and a model with full
attention everywhere is one group whose places are its layers. If the model is cut into stages, the groups, and which
group holds a block, are the same on all stages; each stage's blocks have places for its own layers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hookline.core.contracts import FullAttention, LayerCache, ModelSpec, RecurrentState, SharedCache, SlidingWindow
from hookline.core.errors import ConfigError

Place = tuple[int, int]
"""A group, and the place of a layer in its blocks."""
_Members = dict[int, list[int]]
"""Layers of one kind, by the stage that has them."""
FULL_PADDING_WEIGHT = 4
"""Cost of a place without a layer in a group with full attention, whose blocks grow with the sequence, relative to a
group with a window.
"""


@dataclass(frozen=True)
class CacheGroups:
    """How the layers of a model share blocks.

    windows: for each group, how many tokens a query of its layers sees; None for all. places: for each layer, where its
    keys and values lie in its stage's blocks; None if it has none. A layer that attends over another layer's cache has
    the place of that layer. num_places: how many layers a block has room for, the most of any stage. writes: for each
    layer, whether it has keys and values of its own. has_states: whether any layer keeps a recurrent state.
    """

    windows: tuple[int | None, ...]
    places: tuple[Place | None, ...]
    num_places: int
    writes: tuple[bool, ...]
    has_states: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, max_model_len: int, layer_counts: Sequence[int] = ()) -> CacheGroups:
        """The groups of a model. A window as long as max_model_len counts as full attention.

        layer_counts: layers of each stage; empty if the model is not cut. Each kind of layers has as many groups as the
        stage with most of them needs, and each stage distributes its own layers over these.
        Raises: ConfigError if the spec contradicts itself, or if a layer and the layer whose cache it shares are on
        different stages.
        """
        layers = [_seen(layer, max_model_len) for layer in checked_layers(spec)]
        stage_of = [stage for stage, count in enumerate(layer_counts or (len(layers),)) for _ in range(count)]
        kinds = _by_window_and_stage(layers, stage_of)
        most = {window: max(map(len, members.values())) for window, members in kinds.items()}
        num_places = best_num_places(most)
        groups = _numbered_groups(most, num_places)
        places: dict[int, Place] = {}
        for stage in dict.fromkeys(stage_of):
            own = {window: members.get(stage, ()) for window, members in kinds.items()}
            places |= _dealt_out(own, groups)
        places |= [*_shared_places(layers, places, stage_of)]
        return cls(
            tuple(window for window, numbers in groups.items() for _ in numbers) or (None,),
            tuple(map(places.get, range(len(layers)))),
            num_places,
            writes=tuple(_has_own(layer) for layer in layers),
            has_states=any(isinstance(layer, RecurrentState) for layer in layers),
        )

    def num_places_of(self, layers: range) -> int:
        """How many layers a block has room for on the stage that has these layers."""
        return max((place[1] + 1 for place in map(self.places.__getitem__, layers) if place is not None), default=0)

    @property
    def num_groups(self) -> int:
        """The number of groups, and of the blocks for each block_size tokens that all windows still see."""
        return len(self.windows)

    @property
    def is_plain(self) -> bool:
        """Whether there is one group, which keeps every token, so that blocks can be counted without groups."""
        return self.windows == (None,)

    @property
    def is_by_layer(self) -> bool:
        """Whether all layers are in one group, with keys and values of their own, so that ranks need no groups."""
        return self.is_plain and all(self.writes)

    def most_blocks(self, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens holds at a time, while it is computed in any chunks."""
        columns = -(-num_tokens // block_size)
        most = [most_columns(window, block_size, max_num_batched_tokens) for window in self.windows]
        return sum(columns if one is None else min(columns, one) for one in most)

    def longest(self, num_blocks: int, block_size: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Tokens of the longest sequence, of at most max_model_len, that a pool of `num_blocks` blocks can compute."""
        low, high = 0, -(-max_model_len // block_size)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.most_blocks(middle * block_size, block_size, max_num_batched_tokens) <= num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(max_model_len, low * block_size)


ALL_TOKENS = CacheGroups((None,), (), 0, ())
"""The groups of a model whose layers all keep every token."""


def first_seen(num_computed_tokens: int, window: int, block_size: int) -> int:
    """The first block that the next query of a sequence, at position num_computed_tokens, sees in this window."""
    return max(0, num_computed_tokens - window + 1) // block_size


def most_columns(window: int | None, block_size: int, max_num_batched_tokens: int) -> int | None:
    """Most blocks in a row that a chunk's queries see and the chunk writes; None without a window."""
    if window is None:
        return None
    return (window - 1 + max_num_batched_tokens + block_size - 2) // block_size + 1


def best_num_places(num_layers: Mapping[int | None, int]) -> int:
    """Most layers of a group, chosen so that there are few groups and few places without a layer.

    num_layers: layers of each kind, by window.
    """

    def _cost(num_places: int) -> tuple[int, int]:
        total = 0
        for window, count in num_layers.items():
            num_groups = -(-count // num_places)
            padding = num_groups * num_places - count
            total += num_groups + padding * (FULL_PADDING_WEIGHT if window is None else 1)
        return total, -num_places

    return min(range(1, max(num_layers.values(), default=0) + 1), key=_cost, default=0)


def keeps_tokens(spec: ModelSpec) -> bool:
    """Whether any layer has keys and values. If none has, blocks take no memory."""
    return any(_has_own(layer) for layer in spec.cache_layers)


def checked_layers(spec: ModelSpec) -> Sequence[LayerCache]:
    """The cache that each layer keeps, checked.

    Raises: ConfigError for another number of layers than num_layers, a window of no tokens, or a layer that shares the
    cache of a layer without one or of a later layer.
    """
    layers = spec.cache_layers
    if len(layers) != spec.num_layers:
        raise ConfigError(f"the model's spec.layers has {len(layers)} entries for num_layers={spec.num_layers}")
    for index, layer in enumerate(layers):
        if isinstance(layer, SlidingWindow) and layer.num_tokens < 1:
            raise ConfigError(
                f"the model's spec.layers[{index}] is a window of {layer.num_tokens} tokens; 1 is the least"
            )
        if isinstance(layer, SharedCache):
            is_earlier = 0 <= layer.layer < index
            if not is_earlier or not _has_own(layers[layer.layer]):
                raise ConfigError(
                    f"the model's spec.layers[{index}] shares the cache of layer {layer.layer}, which must be an "
                    "earlier one with keys and values of its own"
                )
    return layers


def _by_window_and_stage(layers: Sequence[LayerCache], stage_of: Sequence[int]) -> dict[int | None, _Members]:
    """The layers with keys and values of their own, by window, and for each window by stage."""
    kinds: dict[int | None, _Members] = {}
    for index, layer in enumerate(layers):
        if _has_own(layer):
            kinds.setdefault(_window(layer), {}).setdefault(stage_of[index], []).append(index)
    return kinds


def _numbered_groups(most: Mapping[int | None, int], num_places: int) -> dict[int | None, range]:
    """The groups' numbers for each kind: full attention first, then by window. most: layers of a kind on any stage."""
    groups: dict[int | None, range] = {}
    num_groups = 0
    for window in sorted(most, key=lambda window: (window is not None, window)):
        groups[window] = range(num_groups, num_groups - (-most[window] // num_places))
        num_groups = groups[window].stop
    return groups


def _dealt_out(
    own: Mapping[int | None, Sequence[int]], groups: Mapping[int | None, range]
) -> Iterator[tuple[int, Place]]:
    """The places of a stage's own layers. No group gets more layers than are needed to place all of them."""
    size = max((-(-len(members) // len(groups[window])) for window, members in own.items()), default=0)
    for window, members in own.items():
        for number, index in enumerate(members):
            yield index, (groups[window][number // size], number % size)


def _shared_places(
    layers: Sequence[LayerCache], places: Mapping[int, Place], stage_of: Sequence[int]
) -> Iterator[tuple[int, Place]]:
    """The places of layers that attend over another layer's cache: the same as that layer's."""
    for index, layer in enumerate(layers):
        if isinstance(layer, SharedCache):
            _refuse_parted(index, layer.layer, stage_of)
            yield index, places[layer.layer]


def _refuse_parted(index: int, owner: int, stage_of: Sequence[int]) -> None:
    if stage_of[index] != stage_of[owner]:
        raise ConfigError(
            f"layer {index} of the model shares the cache of layer {owner}, and they are on stages {stage_of[index]} "
            f"and {stage_of[owner]}; keep them on one by engine.pp_layers, or take a lower pp"
        )


def _has_own(layer: LayerCache) -> bool:
    """Whether it has keys and values of its own."""
    return isinstance(layer, FullAttention | SlidingWindow)


def _seen(layer: LayerCache, max_model_len: int) -> LayerCache:
    is_wide = isinstance(layer, SlidingWindow) and layer.num_tokens >= max_model_len
    return FullAttention() if is_wide else layer


def _window(layer: LayerCache) -> int | None:
    return layer.num_tokens if isinstance(layer, SlidingWindow) else None
