"""Recurrent states of transformers' models, which core keeps in its rows and not in a layer's cache object.

A module with a state reads it from transformers' cache at the beginning of a forward, and writes it back at the end. A
served module is called for one request after the other, for the decodes of a step together, with a cache that holds the
states of these requests alone. Keys and values never enter that cache.
Legend: T tokens of a step, B requests that are computed together, L tokens of each of them, R rows of states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache

from hookline.core.contracts import RecurrentState, StateRows, StateTensor

_Linear: Any = getattr(cache_utils, "LinearAttentionLayer", object)
"""The class of states in transformers' releases that have one for all models; in other releases no states are served.
"""

HAS_STATES = _Linear is not object
"""Whether this release of transformers has that class."""
CONVOLVED, RECURRENT = "conv", "recurrent"
"""The two kinds of states in transformers' caches; a layer may have several of each."""


@dataclass(frozen=True)
class Place:
    """The place of a state in transformers' cache: the cache's layer, a kind, and its number among states of it."""

    layer: int
    kind: str
    index: int


@dataclass(frozen=True)
class LayerStates:
    """The states of one module. module: its name in the decoder.

    forgets: whether it ignores an earlier state when it gets several tokens, as transformers' Mamba 1 does.
    """

    module: str
    tensors: tuple[tuple[Place, StateTensor], ...]
    forgets: bool = False

    @property
    def cache(self) -> RecurrentState:
        """The entry of ModelSpec.layers."""
        return RecurrentState(tuple((name(place), form) for place, form in self.tensors), lengths_on_host=True)


def name(place: Place) -> str:
    """Core's name of a state."""
    return f"{place.kind}{place.layer}.{place.index}"


class StateCache(Cache):
    """The cache that a served model gets: it holds the states of the requests of the current step.

    touched: called with each state that a module reads or writes, while a model is probed.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        counts = [getattr(layer, "number_of_states", 1) for layer in DynamicCache(config=config).layers]
        layers: Any = [_Layer(number_of_states=count) for count in counts]
        super().__init__(layers=layers)
        self.layers: Any = layers
        self.touched: Callable[[Place], None] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Core keeps the keys and values of earlier tokens, so this cache returns only those of the step."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._touch(Place(layer_idx, CONVOLVED, state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Tensor:
        self._touch(Place(layer_idx, CONVOLVED, state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **options)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._touch(Place(layer_idx, RECURRENT, state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        self._touch(Place(layer_idx, RECURRENT, state_idx))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **options)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for its one state of a layer."""
        place = Place(layer_idx, RECURRENT, 0)
        self._touch(place)
        return self.get(place) if self.layers[layer_idx].has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """See get_linear_cache."""
        place = Place(layer_idx, RECURRENT, 0)
        self._touch(place)
        self.put(place, linear_cache, has_tokens=True)

    def get(self, place: Place) -> Tensor | None:
        """A state of the requests that are being computed: (B, ...)."""
        kept: dict[int, Tensor | None] = getattr(self.layers[place.layer], f"{place.kind}_states")
        return kept[place.index]

    def put(self, place: Place, state: Tensor, *, has_tokens: bool) -> None:
        """Set a state: (B, ...). has_tokens: whether these requests have earlier tokens; if not, it is zeros."""
        layer, index = self.layers[place.layer], place.index
        getattr(layer, f"{place.kind}_states")[index] = state
        getattr(layer, f"is_{place.kind}_states_initialized")[index] = True
        layer.has_previous_state[index] = has_tokens
        layer.dtype, layer.device = state.dtype, state.device
        if place.kind == CONVOLVED:
            layer.conv_kernel_size[index] = state.shape[-1]

    def _touch(self, place: Place) -> None:
        if self.touched is not None:
            self.touched(place)


class ServedStates:
    """The states of one served model during a forward. cache: None if it keeps none."""

    def __init__(self, cache: StateCache | None) -> None:
        self.cache = cache
        self._groups: list[tuple[Tensor, slice, bool | None]] | None = None

    def begin(self) -> None:
        """A new step."""
        self._groups = None

    def compute(
        self, states: LayerStates, rows: StateRows, forward: Callable[..., Any], args: Any, options: Any
    ) -> Any:
        """Call a module for the requests of a step: inputs (1, T, ...) -> outputs (1, T, ...).

        Inputs that are no tensors (1, T, ...) are given to each call as they are.
        """
        cache, outputs = self.cache, []
        assert cache is not None
        if self._groups is None:
            self._groups = list(_groups(rows))
        num_tokens = next(one.shape[1] for one in tree_iter((args, options)) if isinstance(one, Tensor))
        for rows_B, span, is_new in self._groups:
            kept = {place: rows.tensors[name(place)] for place, _ in states.tensors}
            for place, state_R in kept.items():
                cache.put(place, state_R.index_select(0, rows_B), has_tokens=is_new is not True)
            is_decode, length = is_new is None, span.stop - span.start
            one_by_one = states.forgets and is_new is False and length > 1
            steps = [slice(at, at + 1) for at in range(span.start, span.stop)] if one_by_one else [span]
            for step in steps:
                given = tree_map_only(Tensor, _Taken(step, num_tokens, is_decode), (args, options))
                output = forward(*given[0], **given[1])
                outputs.append(tree_map_only(Tensor, _as_row, output) if is_decode else output)
            for place, state_R in kept.items():
                state = cache.get(place)
                assert state is not None
                state_R.index_copy_(0, rows_B, state.to(state_R.dtype))
        return _joined(outputs)


@dataclass(frozen=True)
class _Taken:
    """Take a group's tokens out of an input: (1, T, ...) -> (1, L, ...), or (B, 1, ...) for decodes."""

    span: slice
    num_tokens: int
    is_decode: bool

    def __call__(self, given: Tensor) -> Tensor:
        if given.ndim < 2 or given.shape[:2] != (1, self.num_tokens):
            return given
        taken = given[:, self.span]
        return taken.transpose(0, 1) if self.is_decode else taken


def _as_row(output: Tensor) -> Tensor:
    return output.transpose(0, 1) if output.ndim > 1 and output.shape[1] == 1 else output


def _joined(outputs: list[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], tuple):
        return tuple(_joined(list(ones)) for ones in zip(*outputs, strict=True))
    is_by_token = isinstance(outputs[0], Tensor) and all(one.shape[0] == 1 for one in outputs)
    return torch.cat(outputs, 1) if is_by_token else outputs[-1]


def _groups(rows: StateRows) -> Iterator[tuple[Tensor, slice, bool | None]]:
    """Rows of states, the tokens that are computed with them, and whether these are a request's first.

    None: one token of each of several requests, whose states are zeros before their first one.
    """
    num_decodes, num_requests = rows.num_decodes, len(rows.rows_B)
    if num_decodes:
        yield rows.rows_B[:num_decodes], slice(0, num_decodes), None
    if num_requests == num_decodes:
        return
    assert rows.query_starts_host is not None, "RecurrentState.lengths_on_host keeps prompts out of captured steps"
    starts, is_new = rows.query_starts_host.tolist(), rows.is_new_B.tolist()
    for row in range(num_decodes, num_requests):
        if starts[row] < starts[row + 1]:
            yield rows.rows_B[row : row + 1], slice(starts[row], starts[row + 1]), is_new[row]


def serve_states(module: nn.Module, compute: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
    """Replace a module's forward by `compute(own forward, args, options)`."""
    own = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        return compute(own, args, options)

    module.forward = forward


class SeenStates:
    """Finds out, in a forward without data, which modules keep states, in the order of their calls with attention's.

    slots: the modules found so far, those with attention too. Raises: UnservedStates.
    """

    def __init__(self, decoder: nn.Module, cache: StateCache, slots: list[Any], dtype: torch.dtype) -> None:
        self.cache, self.slots, self.dtype = cache, slots, dtype
        self.calls: list[_Call] = []
        self._hooks = []
        for label, module in decoder.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda _, __, label=label: self._enter(label)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        cache.touched = self._touched

    def stop(self) -> None:
        """Watch no longer."""
        self.cache.touched = None
        for hook in self._hooks:
            hook.remove()

    def attends(self) -> None:
        """Attention is called."""
        if keeper := next((call.module for call in self.calls if call.places), None):
            raise UnservedStates(f"{keeper} keeps a state and attends, which cannot be told apart")

    def _enter(self, module: str) -> None:
        self.calls.append(_Call(module, len(self.slots), []))

    def _leave(self) -> None:
        call = self.calls.pop()
        if call.places:
            tensors = tuple((place, self._form(place)) for place in call.places)
            self.slots[call.slot] = LayerStates(call.module, tensors)

    def _form(self, place: Place) -> StateTensor:
        state = self.cache.get(place)
        if state is None:
            raise UnservedStates(f"its cache has no {place.kind} state {place.index} in layer {place.layer}")
        return StateTensor(tuple(state.shape[1:]), "" if state.dtype == self.dtype else str(state.dtype)[6:])

    def _touched(self, place: Place) -> None:
        call = self.calls[-1]
        if not call.places:
            if call.slot != len(self.slots) or any(outer.places for outer in self.calls):
                raise UnservedStates(f"{call.module} keeps a state around other layers")
            self.slots.append(None)
        if place not in call.places:
            call.places.append(place)


@dataclass
class _Call:
    module: str
    slot: int
    places: list[Place]


class UnservedStates(Exception):
    """States that cannot be kept by core; says which."""


@contextmanager
def seen_forgetting(decoder: nn.Module, cache: StateCache | None, slots: list[Any]) -> Iterator[None]:
    """See in a forward without data, which continues other tokens, which modules do not look at their states.

    Sets `forgets` in these slots.
    """
    order = [index for index, slot in enumerate(slots) if isinstance(slot, LayerStates)]
    calls = iter(order)
    kept = {}
    for label in {slots[index].module for index in order}:
        module = decoder.get_submodule(label)
        kept[module] = module.forward

        def compute(own: Callable[..., Any], args: Any, options: Any) -> Any:
            index = next(calls)
            assert cache is not None
            given = [cache.get(place) for place, _ in slots[index].tensors]
            with _Read([one for one in given if one is not None]) as read:
                output = own(*args, **options)
            slots[index] = replace(slots[index], forgets=not read.all)
            return output

        serve_states(module, compute)
    try:
        yield
    finally:
        for module, own in kept.items():
            module.forward = own


class _Read(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which of these tensors are read by an operation."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unread = {id(tensor) for tensor in tensors}

    @property
    def all(self) -> bool:
        """Whether every tensor was."""
        return not self.unread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[:1] if func._schema.name.startswith("aten::copy_") else ()
        for one in tree_iter((args[len(written) :], kwargs)):
            self.unread.discard(id(one))
        return func(*args, **(kwargs or {}))


class _Layer(_Linear):  # type: ignore[misc]
    """transformers' own, which keeps its tensors without marking them for its compiler."""

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        if conv_states is not None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_states[state_idx] = conv_states.new_zeros((*conv_states.shape[:-1], width))
            self.conv_kernel_size[state_idx] = width
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self.is_recurrent_states_initialized[state_idx] = True
