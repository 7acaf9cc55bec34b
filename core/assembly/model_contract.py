"""Checks that a model's sizes and weight targets have the types of its contract, before they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from hookline.core.contracts import (
    LayerCache,
    Model,
    ModelSpec,
    RecurrentState,
    SharedCache,
    SlidingWindow,
    StateTensor,
    WeightTarget,
)
from hookline.core.errors import ConfigError, PluginError, shown
from hookline.core.kv_cache.groups import checked_layers
from hookline.core.plugin.blame import breach
from hookline.core.plugin.check_entry import features_fault
from hookline.core.plugin.registry import Entry
from hookline.core.worker.form_checks import described

_SIZES = [field.name for field in fields(ModelSpec) if field.type == "int"]


def stated_spec(entry: Entry, model_class: Any, hf_config: Mapping[str, Any]) -> ModelSpec:
    """The sizes that a model class reads from a config.json.

    Raises: PluginError naming the model, if they are not a ModelSpec with fields of the right types.
    """
    spec: ModelSpec = model_class.spec(hf_config)
    fault = _spec_fault(spec)
    if fault is not None:
        raise PluginError(breach(entry, "spec", fault))
    return spec


def stated_targets(entry: Entry, model: Model, *shapes: Mapping[str, Sequence[int]]) -> Mapping[str, WeightTarget]:
    """The targets of a model's weights, by the checkpoint's names. shapes: of its tensors, for FitsTargets.

    Raises: PluginError naming the model, if they are not WeightTargets by name.
    """
    method = "targets_for" if shapes else "weight_targets"
    targets: Mapping[str, WeightTarget] = getattr(model, method)(*shapes)
    fault = _targets_fault(targets)
    if fault is not None:
        raise PluginError(breach(entry, method, fault))
    return targets


def _targets_fault(targets: Any) -> str | None:
    if not isinstance(targets, Mapping):
        return f"it returned {described(targets)}, not a mapping of names to WeightTargets"
    for name, target in targets.items():
        if not isinstance(name, str):
            return f"the name {shown(name)} is not a str"
        if not isinstance(target, WeightTarget):
            return f"{shown(name)} has {described(target)}, not a WeightTarget"
        views = [target.view, *(piece.view for piece in target.more)]
        for view in views:
            if not isinstance(view, Tensor | None):
                return f"{shown(name)} has a WeightTarget whose view is {described(view)}, not a Tensor"
    return None


def _spec_fault(spec: Any) -> str | None:
    if not isinstance(spec, ModelSpec):
        return f"it returned {described(spec)}, not a ModelSpec"
    for name in _SIZES:
        if not _is_count(getattr(spec, name)):
            return f"its {name}={shown(getattr(spec, name))} is not a whole number of at least 1"
    if spec.num_heads % spec.num_kv_heads:
        return f"its num_kv_heads={spec.num_kv_heads} does not divide num_heads={spec.num_heads}"
    if spec.value_dim is not None and not (_is_count(spec.value_dim) and spec.value_dim <= spec.head_dim):
        known = f"None or a whole number from 1 to head_dim={spec.head_dim}"
        return f"its value_dim={shown(spec.value_dim)} is not {known}"
    if not isinstance(spec.attention, frozenset | set):
        return f"its attention={shown(spec.attention)} is not a frozenset of names"
    if (fault := features_fault("its attention", spec.attention)) is not None:
        return fault
    if not isinstance(spec.layers, tuple | list):
        return f"its layers={shown(spec.layers)} is not a tuple of what each layer keeps"
    for index, layer in enumerate(spec.layers):
        if (fault := _layer_fault(f"its layers[{index}]", layer)) is not None:
            return fault
    try:
        checked_layers(spec)
    except ConfigError as error:
        return str(error)
    return None


def _layer_fault(what: str, layer: LayerCache) -> str | None:
    match layer:
        case SlidingWindow():
            return _unless(_is_int, f"{what}.num_tokens", layer.num_tokens, "a whole number")
        case SharedCache():
            return _unless(_is_int, f"{what}.layer", layer.layer, "the index of a layer")
        case RecurrentState():
            return _unless(
                _are_tensors, f"{what}.tensors", layer.tensors, "a tuple of pairs of a name and a StateTensor"
            )
        case _:
            kinds = "a FullAttention, SlidingWindow, SharedCache, RecurrentState or NoCache"
            return _unless(lambda value: isinstance(value, LayerCache), what, layer, kinds)


def _unless(is_right: Callable[[Any], bool], what: str, value: Any, kind: str) -> str | None:
    return None if is_right(value) else f"{what}={shown(value)} is not {kind}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 1


def _are_tensors(tensors: Any) -> bool:
    return isinstance(tensors, tuple | list) and all(
        isinstance(one, tuple | list) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], StateTensor)
        for one in tensors
    )
