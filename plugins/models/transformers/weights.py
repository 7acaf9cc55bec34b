"""Maps a checkpoint's tensors to the parameters of a transformers model, which may have other names and forms.

transformers renames some tensors when it loads a checkpoint, and merges the matrices of single experts, by its own
tables. Renamings are applied, merged experts are filled range by range; other conversions are refused by name.
Legend: X experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter, rename_source_key

from hookline.core.contracts import Part, WeightTarget
from hookline.plugins.models.transformers.config import refuse
from hookline.plugins.models.transformers.probe import decoder_name
from hookline.plugins.models.transformers.text_part import TEXT_PART, TextWithHead

MERGED = ["MergeModulelist"]
"""Operations that put the same matrix of all experts into one tensor (X, ...)."""
JOINED = ["Concatenate"]
"""Operations that put the matrices of several tensors one below the other."""
CUT = ["Split"], ["Chunk"]
"""Operations that cut a tensor into several, in sizes that are given or equal."""
MERGED_AND_JOINED = ["MergeModulelist", "Concatenate"]
"""Operations that put several matrices of each expert, one below the other, into one tensor (X, ...)."""
SCALES = ("_scale", "_scale_inv")
"""How the names of the scales of all experts end."""
Targets = Mapping[str, WeightTarget]


class StoredNames:
    """Maps names of a checkpoint's tensors to the model's. known: names of all targets, once there are any.

    unused: names of modules that are left out, with their tensors.
    """

    def __init__(self, model: PreTrainedModel, unused: Sequence[str] = ()) -> None:
        changes = [*get_model_conversion_mapping(model), *_of_whole(model)]
        converters = [one for one in changes if isinstance(one, WeightConverter) and not _exchanges(one)]
        self.converters = [one for one in converters if not _cuts(one)]
        self.cuts = [one for one in converters if _cuts(one)]
        self.renamings: list[Any] = [one for one in changes if not isinstance(one, WeightConverter)]
        self.modules = {name for name, _ in model.named_modules()}
        self.prefix, self.model_type = f"{decoder_name(model)}.", model.config.model_type
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self.ignored = re.compile("|".join(f"({pattern})" for pattern in ignored) or r"(?!)")
        self.unused = tuple(f"{name}." for name in [*unused, *_draft_layers(model, self.prefix)])
        self.known: set[str] = set()
        self.forms: list[tuple[Targets, Targets]] = []
        """Targets of a parameter in the form of released checkpoints, and in its own, of each that has both."""
        self.stacks: list[tuple[Sequence[str], Tensor]] = []
        """Each parameter that several stored tensors make up, one below the other, with their names."""

    def name(self, stored: str) -> str | None:
        """The model's name of a stored tensor; None if nothing needs it."""
        renamed: str = rename_source_key(stored, self.renamings, [])[0]
        names = renamed, f"{self.prefix}{renamed}", renamed.removeprefix(self.prefix)
        for name in names:
            if name in self.known:
                return name
        if self.ignored.search(stored) or renamed.startswith(self.unused):
            return None
        return next((name for name in names if name.rpartition(".")[0] in self.modules), renamed)

    def converter(self, name: str) -> tuple[WeightConverter, str] | None:
        """The converter that makes this parameter from stored tensors, and the part of its name before the pattern."""
        for converter in self.converters:
            for pattern in map(_plain, converter.target_patterns):
                if name.endswith(pattern):
                    return converter, name.removesuffix(pattern)
        return None

    def as_stored(self, targets: Targets, shapes: Mapping[str, Sequence[int]]) -> Targets:
        """The targets for a checkpoint with tensors of these shapes.

        transformers saves in the form of released checkpoints, or, if it is told so, each parameter as it is. Of what
        was stacked from several tensors it saves parts of equal sizes, whatever sizes the released ones have. Quantised
        tensors of all experts are dequantised one by one, under the names of the released form.
        """
        found: dict[str, WeightTarget] = dict(targets)
        for released, own in self.forms:
            if own.keys() <= shapes.keys() and not any(f"{name}{end}" in shapes for name in own for end in SCALES):
                for name in released:
                    del found[name]
                found |= own
        for names, parameter in self.stacks:
            rows = [shapes[name][0] for name in names if shapes.get(name)]
            if len(rows) == len(names) and sum(rows) == len(parameter):
                views = parameter.split_with_sizes(rows)
                found |= {name: WeightTarget.whole(view) for name, view in zip(names, views, strict=True)}
        return found

    def join_parts(self, targets: dict[str, WeightTarget]) -> dict[str, WeightTarget]:
        """The targets, in which linears that a checkpoint holds in one tensor are joined to one target."""
        targets = dict(targets)
        for converter in self.cuts:
            source, *parts = map(_plain, (converter.source_patterns[0], *converter.target_patterns))
            for end in ("",) if source.endswith(".weight") else (".weight", ".bias"):
                first = f"{parts[0]}{end}"
                for stem in [name.removesuffix(first) for name in targets if name.endswith(first)]:
                    pieces = {one: targets.pop(one) for one in (f"{stem}{part}{end}" for part in parts)}
                    joined = {f"{stem}{source}{end}": _joined([*pieces.values()])}
                    self.forms.append((joined, pieces))
                    targets |= joined
        return targets


def parameter_targets(
    names: StoredNames, name: str, parameter: Tensor, part: Part | None = None, dim: int = 0
) -> dict[str, WeightTarget]:
    """The targets of the tensors that make up a parameter or a buffer: the whole tensor, or the matrices of experts.

    part, dim: this rank's part of each matrix of an expert; None for all.

    Raises: ConfigError if transformers changes its form in a way that is not known here.
    """
    found = names.converter(name)
    if found is None and part is not None:
        refuse(names.model_type, f"its checkpoints hold {name} as one tensor, which is not shared out here; take tp=1")
    if found is None:
        return {name: WeightTarget.whole(parameter, init=_init(name, parameter))}
    (converter, stem), operations = found, [type(one).__name__ for one in found[0].operations]
    sources = [_plain(source) for source in converter.source_patterns]
    targets: dict[str, WeightTarget] = {}
    is_stack = operations == JOINED and getattr(converter.operations[0], "dim", None) == 0
    if is_stack and part is None and not any("*" in source for source in sources):
        stored, own = [stem + source for source in sources], WeightTarget.whole(parameter)
        views = parameter.tensor_split(len(stored))
        targets = {name: WeightTarget.whole(view) for name, view in zip(stored, views, strict=True)}
        names.stacks.append((stored, parameter))
    elif operations in (MERGED, MERGED_AND_JOINED) and all("*" in source for source in sources):

        def target(matrices: Tensor, dim: int) -> WeightTarget:
            return WeightTarget.whole(matrices) if part is None else WeightTarget.shard(matrices, dim, part)

        for index, matrices in enumerate(parameter):
            for source, matrix in zip(sources, matrices.chunk(len(sources)), strict=True):
                targets[stem + source.replace("*", str(index))] = target(matrix, dim)
        merged = [target(matrices, dim + 1) for matrices in parameter.chunk(len(sources), 1)]
        own = WeightTarget.joined(merged, 1) if len(merged) > 1 else merged[0]
    else:
        refuse(names.model_type, f"its checkpoints hold {name} in another form ({', '.join(operations)})")
    names.forms.append((targets, {name: own}))
    return targets


def refuse_other_forms(names: StoredNames, targets: dict[str, WeightTarget]) -> None:
    """Refuse linears and embeddings that checkpoints hold in another form.

    Raises: ConfigError with the name of one.
    """
    for name in targets:
        found = names.converter(name)
        if found is not None:
            operations = ", ".join(type(one).__name__ for one in found[0].operations)
            refuse(names.model_type, f"its checkpoints hold {name} in another form ({operations})")


def _joined(targets: Sequence[WeightTarget]) -> WeightTarget:
    """One tensor that holds those of several targets, one below the other, of which some may be quantised from it."""
    if all(one.write is None for one in targets):
        return WeightTarget.joined(targets)
    stops = [*accumulate(one.shape[0] for one in targets)]

    def write(whole: Any) -> None:
        for target, stop in zip(targets, stops, strict=True):
            target.fill(whole[stop - target.shape[0] : stop])

    view = targets[0].view
    assert view is not None
    return WeightTarget.converted(view, (stops[-1], *targets[0].shape[1:]), write)


def _draft_layers(model: PreTrainedModel, prefix: str) -> list[str]:
    """Names of the layers behind the last one that draft tokens; transformers lists those of released sizes alone."""
    config = model.config.get_text_config(decoder=True)
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None)
    layers = range(first, first + count) if isinstance(count, int) else ()
    return [f"{start}layers.{layer}" for layer in layers for start in (prefix, "")]


def _of_whole(model: PreTrainedModel) -> list[WeightConverter]:
    """Conversions that transformers lists for a whole model with towers, for its text part."""
    if not isinstance(model, TextWithHead):
        return []
    changes_of: Any = get_checkpoint_conversion_mapping
    whole = changes_of(model.config.model_type.removesuffix(TEXT_PART)) or []
    return [one for one in whole if isinstance(one, WeightConverter)]


def _exchanges(converter: WeightConverter) -> bool:
    """Whether it only exchanges dimensions if shapes require it, which core does for merged experts itself."""
    return all(getattr(one, "check_dims", False) for one in converter.operations)


def _cuts(converter: WeightConverter) -> bool:
    """Whether it cuts a stored matrix into several linears, one below the other."""
    operations, num_parts = converter.operations, len(converter.target_patterns)
    return [type(one).__name__ for one in operations] in CUT and getattr(operations[0], "dim", 0) == 0 < num_parts - 1


def _init(name: str, parameter: Tensor) -> Any:
    if name.endswith("bias"):
        return "zeros"
    return "ones" if parameter.ndim == 1 else "normal"


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "").removeprefix("^").removesuffix("$")
