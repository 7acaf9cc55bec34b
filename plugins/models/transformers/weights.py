"""Maps a checkpoint's tensors to the parameters of a transformers model, which may have other names and forms.

transformers renames some tensors when it loads a checkpoint, and merges the matrices of single experts, by its own
tables. Renamings are applied, merged experts are filled range by range; other conversions are refused by name.
Legend: X experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
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
MERGED_AND_JOINED = ["MergeModulelist", "Concatenate"]
"""Operations that put several matrices of each expert, one below the other, into one tensor (X, ...)."""


class StoredNames:
    """Maps names of a checkpoint's tensors to the model's. known: names of all targets, once there are any.

    unused: names of modules that are left out, with their tensors.
    """

    def __init__(self, model: PreTrainedModel, unused: Sequence[str] = ()) -> None:
        changes = [*get_model_conversion_mapping(model), *_of_whole(model)]
        self.converters = [one for one in changes if isinstance(one, WeightConverter) and not _exchanges(one)]
        self.renamings: list[Any] = [one for one in changes if not isinstance(one, WeightConverter)]
        self.linears = {name: one.out_features for name, one in model.named_modules() if type(one) is nn.Linear}
        self.modules = {name for name, _ in model.named_modules()}
        self.prefix, self.model_type = f"{decoder_name(model)}.", model.config.model_type
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self.ignored = re.compile("|".join(f"({pattern})" for pattern in ignored) or r"(?!)")
        self.unused = tuple(f"{name}." for name in unused)
        self.known: set[str] = set()

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

    def rows_of(self, stem: str, sources: list[str], parameter: Tensor) -> list[int] | None:
        """Rows of each of several stored convolutions that are a single one here, by the projections before them.

        OLMo-hybrid's q_conv1d is behind q_proj. None if these do not add up.
        """
        behind = [stem + re.sub(r"_conv1d\.weight$", "_proj", source) for source in sources]
        rows = [self.linears.get(name, 0) for name in behind]
        return rows if sum(rows) == parameter.shape[0] and all(rows) else None

    def join_parts(self, targets: dict[str, WeightTarget]) -> dict[str, WeightTarget]:
        """The targets, in which linears that a checkpoint holds in one tensor are joined to one target."""
        targets = dict(targets)
        for converter in self.converters:
            if [type(one).__name__ for one in converter.operations] != ["Split"]:
                continue
            source, parts = _plain(converter.source_patterns[0]), [*map(_plain, converter.target_patterns)]
            for name in [name for name in targets if name.endswith(f"{parts[0]}.weight")]:
                stem = name.removesuffix(f"{parts[0]}.weight")
                pieces = [targets.pop(f"{stem}{part}.weight") for part in parts]
                targets[f"{stem}{source}.weight"] = _joined(pieces)
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
    rows = names.rows_of(stem, sources, parameter) if operations == JOINED else None
    if rows is not None:
        views = parameter.split_with_sizes(rows)
        return {stem + source: WeightTarget.whole(view) for source, view in zip(sources, views, strict=True)}
    if operations not in (MERGED, MERGED_AND_JOINED) or not all("*" in source for source in sources):
        refuse(names.model_type, f"its checkpoints hold {name} in another form ({', '.join(operations)})")
    targets = {}
    for index, matrices in enumerate(parameter):
        for source, matrix in zip(sources, matrices.chunk(len(sources)), strict=True):
            target = WeightTarget.whole(matrix) if part is None else WeightTarget.shard(matrix, dim, part)
            targets[stem + source.replace("*", str(index))] = target
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


def _init(name: str, parameter: Tensor) -> Any:
    if name.endswith("bias"):
        return "zeros"
    return "ones" if parameter.ndim == 1 else "normal"


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "").removeprefix("^").removesuffix("$")
