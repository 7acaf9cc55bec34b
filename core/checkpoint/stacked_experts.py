"""Splits tensors that stack the matrices of all experts, for models whose targets name each expert's matrices.

Released checkpoints have three tensors for each expert, `experts.INDEX.gate_proj.weight` and so on, or two stacked ones
for each layer: `experts.gate_up_proj` (X, 2F, D) and `experts.down_proj` (X, D, F), in some models with the last two
dimensions exchanged. Scales of quantised experts are stored in the same way (`experts.down_proj_scale_inv`). If a
model's targets have the names of each expert, stacked tensors are read expert by expert. Imports no torch.
Legend: X experts, D hidden, F intermediate features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hookline.core.checkpoint.safetensors_files import StoredTensor, Within
from hookline.core.contracts import WeightTarget
from hookline.core.util.arrays import ranges_of

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
"""The ends of the names of the two stacked tensors."""
MATRICES = {GATE_UP: (("gate_proj", "up_proj"), ("gate_up_proj",)), DOWN: (("down_proj",),)}
"""The matrices of an expert in each of them, one below the other: apart, or as one."""
SCALES = ("", "_scale_inv", "_scale")
"""Suffixes of the names of stacked tensors: none for values, the others for scales."""


class WithinSlices:
    """A matrix within a stored tensor; indexed with slices, or with an ellipsis, like a tensor."""

    def __init__(self, whole: Any, within: Within) -> None:
        self.whole, self.within = whole, within

    def __getitem__(self, key: Any) -> Any:
        """The range of the matrix."""
        within, ranges = self.within, ranges_of(key, len(self.within.shape))
        *front, rows, columns = [slice(*one.indices(size)) for one, size in zip(ranges, within.shape, strict=True)]
        rows = slice(rows.start + within.first_row, rows.stop + within.first_row)
        chosen = front if within.expert is None else [within.expert]
        if within.transposed:
            return self.whole[(*chosen, columns, rows)].mT
        return self.whole[(*chosen, rows, columns)]


def as_named(stored: Mapping[str, StoredTensor], targets: Mapping[str, WeightTarget]) -> dict[str, StoredTensor]:
    """The stored tensors; stacked tensors are split into each expert's matrices if the targets have their names.

    A tensor whose shape does not fit stays as it is, for the errors about missing and surplus tensors.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        found |= dict(_matrices(name, tensor, stored, targets)) or {name: tensor}
    return found


def dtypes_by_matrix(stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Safetensors' name of the dtype of each tensor, and of each expert's matrix in a stacked tensor, by name."""
    found = {name: tensor.dtype for name, tensor in stored.items()}
    for name, tensor in stored.items():
        if (parts := _parts(name)) is not None and len(tensor.shape) == 3:
            stem, forms, suffix = parts
            names = [f"{kind}.weight{suffix}" for kinds in forms for kind in kinds]
            for expert in range(tensor.shape[0]):
                found |= {f"{stem}.{expert}.{name}": tensor.dtype for name in names}
    return found


def _parts(name: str) -> tuple[str, Sequence[Sequence[str]], str] | None:
    """A stacked tensor's name split into the experts' name, the names of its matrices and its suffix; else None."""
    for end, forms in MATRICES.items():
        for suffix in SCALES:
            if name.endswith(end + suffix):
                return f"{name.removesuffix(end + suffix)}experts", forms, suffix
    return None


def _matrices(
    name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor], targets: Mapping[str, WeightTarget]
) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices in a stacked tensor: each expert's, or the same stacked tensor with its dimensions exchanged if a
    target needs it so.
    """
    parts = _parts(name)
    if parts is None or len(tensor.shape) != 3:
        return
    file_name, (num_experts, *sizes) = tensor.name or name, tensor.shape
    if name in targets:
        exchanged = tuple(reversed(sizes))
        if targets[name].shape == (num_experts, *exchanged) != tensor.shape:
            shape = num_experts, *exchanged
            yield name, replace(tensor, name=file_name, shape=shape, within=Within(shape, transposed=True))
        return
    stem, forms, suffix = parts
    values = stored.get(name.removesuffix(suffix)) if suffix else None
    for kinds in forms:
        yield from _apart(stem, kinds, suffix, replace(tensor, name=file_name), values, targets)


def _apart(
    stem: str,
    kinds: Sequence[str],
    suffix: str,
    tensor: StoredTensor,
    values: StoredTensor | None,
    targets: Mapping[str, WeightTarget],
) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices of these kinds in a stacked tensor of each expert. values: of a tensor of scales."""
    num_experts, *sizes = tensor.shape
    exchanged = tuple(reversed(sizes))
    first = targets.get(f"{stem}.0.{kinds[0]}.weight{suffix}")
    if first is None or len(first.shape) != 2:
        return
    num_rows, num_columns = first.shape
    whole = num_rows * len(kinds), num_columns
    if whole not in (tuple(sizes), exchanged):
        return
    transposed = whole != tuple(sizes)
    if suffix and whole == exchanged:  # square scales: they are exchanged if the values are
        matrix = targets.get(f"{stem}.0.{kinds[0]}.weight")
        rows = matrix.shape[0] * len(kinds) if matrix is not None else None
        transposed = transposed or (values is not None and len(values.shape) == 3 and values.shape[1] != rows)
    for expert in range(num_experts):
        for place, kind in enumerate(kinds):
            within = Within(first.shape, expert, place * num_rows, transposed=transposed)
            yield f"{stem}.{expert}.{kind}.weight{suffix}", replace(tensor, shape=first.shape, within=within)
