"""Dequantises matrices of a checkpoint while they are read, for layers that need them plain.

Knows no format: a `Quantization` loads a matrix of the wanted rows and columns, which is dequantised at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.core.checkpoint.load import has_shape
from hookline.core.checkpoint.safetensors_files import FLOAT_DTYPES, StoredTensor, open_file
from hookline.core.checkpoint.stacked_experts import WithinSlices, as_named
from hookline.core.contracts import MatrixPiece, MatrixPlace, Part, Quantization, WeightTarget
from hookline.core.errors import CheckpointError
from hookline.core.util.arrays import ranges_of

WEIGHT, BIAS = ".weight", ".bias"
"""Suffixes of the names of a linear's matrix and bias."""
_CPU = torch.device("cpu")


class DequantisedSlices:
    """A quantised matrix (O, D) that is indexed by ranges like the plain one; reads only these ranges.

    name: of the linear. tensors: its stored tensors by full name, each indexed like a tensor.
    """

    def __init__(
        self, quantization: Quantization, name: str, shape: tuple[int, int], tensors: Mapping[str, Any]
    ) -> None:
        self.quantization, self.name, self.shape, self.tensors = quantization, name, shape, tensors

    def __getitem__(self, index: Any) -> Tensor:
        """These ranges of the matrix, in float32."""
        rows, columns = map(_part, ranges_of(index, 2), self.shape)
        if not rows.size * columns.size:
            return torch.empty(rows.size, columns.size)
        place = MatrixPlace(rows.size, columns.size, _CPU)
        loading = self.quantization.matrix([MatrixPiece(self.name, 0, rows, columns)], place)
        for name, target in loading.targets().items():
            target.fill(self.tensors[name])
        return loading.loaded().dequantised(torch.float32)


def with_dequantised(
    stored: Mapping[str, StoredTensor],
    targets: Mapping[str, WeightTarget],
    quantization: Quantization,
    stores: Callable[[str], Any],
) -> dict[str, StoredTensor]:
    """The stored tensors as targets name them, with a plain matrix for the quantised tensors of each plain target.

    stores: how the linear of a name is stored; None: as a plain tensor. Tensors that the quantization ignores are left
    out.
    Raises: CheckpointError if a linear's tensor is missing or has another shape, or if an ignored bias is not zero.
    """
    parts_of: dict[str, Mapping[str, WeightTarget]] = {}
    for name, target in targets.items():
        linear = name.removesuffix(WEIGHT)
        is_plain = target.view is not None and target.write is None and len(target.shape) == 2
        if linear == name or not is_plain or stores(linear) is None:
            continue
        num_rows, num_columns = target.shape
        piece = MatrixPiece(linear, 0, Part(num_rows, 0, num_rows), Part(num_columns, 0, num_columns))
        place = MatrixPlace(num_rows, num_columns, torch.device("meta"))
        parts_of[name] = quantization.matrix([piece], place).targets()
    stored = as_named(stored, {**{one: part for parts in parts_of.values() for one, part in parts.items()}, **targets})
    ignored = {name: one for name, one in stored.items() if name not in targets and quantization.ignores(name)}
    _refuse_biases({name: tensor for name, tensor in ignored.items() if name.endswith(BIAS)})
    found = {name: tensor for name, tensor in stored.items() if name not in ignored}
    for name, parts in parts_of.items():
        if not any(one in stored for one in parts):
            continue  # core.checkpoint.load reports the missing tensor
        _check(parts, stored)
        tensors = {one: found.pop(one, stored[one]) for one in parts}
        rows, columns = targets[name].shape
        read = partial(_open, quantization, name.removesuffix(WEIGHT), (rows, columns), tensors)
        first = next(iter(tensors.values()))
        copy = next((one.copy for one in tensors.values() if one.copy), None)
        found[name] = StoredTensor(first.path, targets[name].shape, first.dtype, join=read, copy=copy)
    return found


def _refuse_biases(ignored: Mapping[str, StoredTensor]) -> None:
    """Refuse ignored biases that are not zero: without them the model would compute other results."""
    files = {path: open_file(path) for path in {tensor.path for tensor in ignored.values()}}
    for name, tensor in ignored.items():
        if bool(files[tensor.path].get_tensor(tensor.name or name).any()):
            raise CheckpointError(
                f"the checkpoint has a bias {name} that is not zero, and the model adds none there. Is its config.json "
                "the right one?"
            )


def _check(parts: Mapping[str, WeightTarget], stored: Mapping[str, StoredTensor]) -> None:
    for name, part in parts.items():
        if name not in stored:
            raise CheckpointError(f"the checkpoint has no tensor {name}, which its quantised neighbours need")
        shape = stored[name].shape
        if not has_shape(shape, part):
            raise CheckpointError(f"tensor {name} has shape {list(shape)} and needs {list(part.shape)}")
        stored[name].check(name, part.dtypes or FLOAT_DTYPES)


def _open(
    quantization: Quantization,
    name: str,
    shape: tuple[int, int],
    tensors: Mapping[str, StoredTensor],
    opened: Callable[[Path, str], Any],
) -> DequantisedSlices:
    slices = {one: opened(tensor.path, tensor.name or one) for one, tensor in tensors.items()}
    slices |= {one: WithinSlices(slices[one], tensor.within) for one, tensor in tensors.items() if tensor.within}
    return DequantisedSlices(quantization, name, shape, slices)


def _part(wanted: slice, size: int) -> Part:
    start, stop, step = wanted.indices(size)
    assert step == 1, wanted
    return Part(size, start, max(start, stop))
