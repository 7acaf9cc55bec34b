"""A ScaledMatrix while it is loaded: each stored tensor's part of this rank, put where the matrix has it.

A format says in `StoredPart`s which tensors a linear has and how a rectangle of each is read; fused matrices, shards of
ranks, experts, and blocks that shards cut through are the same for all formats, and are dealt with here.
Legend: O outputs, D inputs of a matrix on this rank, R and C its blocks, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hookline.core.contracts import (
    FP4,
    FP8,
    HALF_INT4,
    INT4,
    INT8,
    MatrixPiece,
    MatrixPlace,
    Quantization,
    QuantizedMatrix,
    ScaledMatrix,
    Scheme,
    WeightTarget,
)
from hookline.core.errors import CheckpointError
from hookline.plugins.quantizations.names import is_named
from hookline.plugins.quantizations.rounding import codes_of, packed, scales_of

Role = Literal["data", "scales", "zeros", "groups", "row_scales", "input_scale", "shape", "unused"]
"""The role of a stored tensor in its matrix. groups: the group of each input. row_scales: scales of whole rows, which
multiply the scales of blocks. shape: outputs and inputs. unused: only checked."""
Read = Callable[[Any, slice, slice], Tensor]
"""A function of a whole tensor, or an object that is indexed like it, and of ranges of outputs and inputs (of blocks,
for scales and zero points): returns the values there, (outputs, inputs), one element each. Scales that hold for all
inputs have one column."""


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor of a linear. suffix: of its name, behind the linear's. shape: of the whole tensor."""

    suffix: str
    role: Role
    shape: tuple[int, ...]
    read: Read
    dtypes: tuple[str, ...] = ()


Parts = Callable[[str, int, int], Sequence[StoredPart]]
"""Given a linear's name, its outputs and its inputs: the tensors that a checkpoint stores of it."""


LARGEST = {FP8: 448.0, FP4: 6.0, INT8: 256.0, INT4: 16.0}
"""The largest size of a value, by the kind of values."""
FLOATS = ("BF16", "F16", "F32", "F64")
"""safetensors' names of the dtypes of values that are not quantised."""


class ScaledQuantization(Quantization):
    """A format of checkpoints whose quantised linears are all stored in the same way. For formats to extend.

    surplus: suffixes of stored tensors that are not needed. data: suffix of the tensor with a linear's values.
    """

    surplus: ClassVar[tuple[str, ...]] = ()
    data: ClassVar[str] = "weight"
    scheme: Scheme
    """The scheme of all its linears."""
    left: Sequence[str]
    """Names of the linears that are not quantised; see `is_named`."""
    dtypes: Mapping[str, str]
    """See StoredForm."""

    def stores(self, name: str) -> Scheme | None:
        """See Quantization."""
        is_left = not is_stored(self.dtypes, f"{name}.{self.data}") and is_named(name, self.left)
        return None if is_left else self.scheme

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> ScaledLoading:
        """See Quantization."""
        return ScaledLoading(pieces, place, self.scheme, self.parts)

    def ignores(self, name: str) -> bool:
        """See Quantization."""
        return name.endswith(self.surplus)

    def parts(self, name: str, num_rows: int, num_columns: int) -> Sequence[StoredPart]:
        """The tensors that a checkpoint stores of a linear, by its name, its outputs and its inputs."""
        raise NotImplementedError


def is_stored(dtypes: Mapping[str, str], data: str) -> bool:
    """Whether a checkpoint has a linear's values in few bits, whatever its lists say: some leave out a quantised head.

    data: the whole name of the tensor of values.
    """
    return dtypes.get(data, FLOATS[0]) not in FLOATS


class ScaledLoading:
    """Implements hookline.core.contracts.LoadingMatrix.

    stated: the scheme by the checkpoint's blocks; `scheme` has smaller ones where a shard or a fused matrix cuts
    through them, and one scale for each output in place of one for the whole tensor.
    """

    def __init__(self, pieces: Sequence[MatrixPiece], place: MatrixPlace, stated: Scheme, parts: Parts) -> None:
        """Allocate the matrix. Rows that no piece has are zero."""
        self.pieces, self.place, self.stated, self.parts = pieces, place, stated, parts
        columns = pieces[0].columns
        self.rows = gcd(stated.rows or 1, *(piece.row for piece in pieces), *(piece.rows.start for piece in pieces))
        is_cut = stated.columns and not stated.is_reordered
        self.columns = gcd(stated.columns, columns.start) if is_cut else stated.columns
        self.scheme = replace(stated, rows=self.rows, columns=self.columns)
        num_rows, num_columns = place.num_rows, place.num_columns
        num_groups = 1
        if self.columns:
            num_groups = -(-(columns.total if stated.is_reordered else num_columns) // self.columns)
        width = num_columns if stated.values in (FP8, INT8) else -(-num_columns // 2)
        dtype = {FP8: torch.float8_e4m3fn, INT8: torch.int8}.get(stated.values, torch.uint8)
        self.data = self._zeros(num_rows, width, dtype=dtype)
        self.scales = self._zeros(-(-num_rows // self.rows), num_groups)
        self.zeros = torch.zeros_like(self.scales) if stated.has_zeros else None
        self.groups = self._zeros(num_columns, dtype=torch.int32) if stated.is_reordered else None
        # By piece, since tensors of several pieces are read at the same time.
        self.groups_of: dict[MatrixPiece, Tensor] = {}
        self.row_scales_of: dict[MatrixPiece, Tensor] = {}
        self.input_scale_of: dict[MatrixPiece, Tensor] = {}
        self.zero_scales: dict[MatrixPiece, str] = {}
        """The pieces of which some scales are zero, with the names of these."""

    def targets(self) -> dict[str, WeightTarget]:
        """See LoadingMatrix."""
        by_name: dict[str, list[tuple[StoredPart, MatrixPiece]]] = {}
        for piece in self.pieces:
            for part in self._parts(piece):
                by_name.setdefault(f"{piece.name}.{part.suffix}", []).append((part, piece))
        return {name: self._target(name, given) for name, given in by_name.items()}

    def loaded(self) -> QuantizedMatrix:
        """See LoadingMatrix."""
        for piece, scales in self.row_scales_of.items():
            self._blocks(self.scales, piece).mul_(scales[:: self.rows])
        for piece, name in self.zero_scales.items():
            self._check_zeros(name, piece)
        if self.groups is not None:
            for piece, groups in self.groups_of.items():
                self._of(self.groups, piece).copy_(groups)
            is_alike = (torch.equal(groups, self._of(self.groups, piece)) for piece, groups in self.groups_of.items())
            if not all(is_alike):
                self._spread_groups()
        input_scale = None
        if self.input_scale_of:
            input_scale = self._zeros()
            for piece, scale in self.input_scale_of.items():
                mine = self._of(input_scale, piece)
                mine.copy_(torch.maximum(mine, scale))  # joined linears multiply the same activations
        sizes = self.place.num_rows, self.place.num_columns
        return ScaledMatrix(self.scheme, *sizes, self.data, self.scales, self.zeros, self.groups, input_scale)

    def _spread_groups(self) -> None:
        """Give each input a scale of its own, since linears that are joined here have their inputs in unlike groups."""
        scales, zeros = self.scales, self.zeros
        self.scheme, self.groups = replace(self.scheme, columns=1, is_reordered=False), None
        self.scales = self._zeros(scales.shape[-2], self.place.num_columns)
        self.zeros = None if zeros is None else torch.zeros_like(self.scales)
        for piece, groups in self.groups_of.items():
            for tensor, of_groups in ((self.scales, scales), (self.zeros, zeros)):
                if tensor is not None and of_groups is not None:
                    self._blocks(tensor, piece).copy_(self._blocks(of_groups, piece)[:, groups.long()])

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        lead = () if self.place.num_experts is None else (self.place.num_experts,)
        return torch.zeros((*lead, *shape), dtype=dtype, device=self.place.device)

    def _parts(self, piece: MatrixPiece) -> Sequence[StoredPart]:
        shape = piece.rows.total, piece.columns.total
        if self.place.from_floats:
            return [StoredPart("weight", "data", shape, _no_read)]
        return self.parts(piece.name, *shape)

    def _target(self, name: str, given: Sequence[tuple[StoredPart, MatrixPiece]]) -> WeightTarget:
        by_role = {"data": self.data, "scales": self.scales, "zeros": self.zeros, "groups": self.groups}
        roles = dict.fromkeys(by_role if self.place.from_floats else [part.role for part, _ in given])
        first, *more = [view for view in map(by_role.get, roles) if view is not None] or [self.data]

        def write_all(whole: Any) -> None:
            for part, piece in given:
                write = self._write_floats if self.place.from_floats else getattr(self, f"_write_{part.role}")
                write(name, part, piece, whole)

        target = WeightTarget.converted(first, given[0][0].shape, write_all, given[0][0].dtypes)
        return replace(target, more=tuple(map(WeightTarget, more)))

    def _of(self, tensor: Tensor, piece: MatrixPiece) -> Tensor:
        return tensor if piece.expert is None else tensor[piece.expert]

    def _write_data(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        values = part.read(whole, _range(piece.rows), _range(piece.columns)).to(self.place.device)
        if values.dtype == torch.float8_e4m3fn and bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointError(f"tensor {name} has NaN among its values; download or copy the checkpoint again")
        self._put(piece, values)

    def _put(self, piece: MatrixPiece, values: Tensor) -> None:
        rows = self._of(self.data, piece)[piece.row : piece.row + piece.rows.size]
        rows.copy_(values if self.stated.values in (FP8, INT8) else packed(values))

    def _write_scales(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        found = self._read_blocks(part, piece, whole).float()
        self._check_sizes(name, found)
        self._check_signs(name, piece, found)
        self._put_blocks(self.scales, piece, found)

    def _check_sizes(self, name: str, scales: Tensor, others: float = 1.0) -> None:
        """others: the largest of the scales that these ones multiply."""
        _check_finite(name, scales)
        if not bool((scales * (LARGEST[self.stated.values] * others)).isfinite().all()):
            raise CheckpointError(
                f"tensor {name} has scales up to {float(scales.abs().max()):g}, by which values become infinite; "
                "download or copy the checkpoint again"
            )

    def _check_signs(self, name: str, piece: MatrixPiece, scales: Tensor) -> None:
        """Scales of integers may be below zero: AutoRound's are, where a group's largest value is negative."""
        if self.stated.values not in (INT8, INT4) and bool((scales < 0).any()):
            raise CheckpointError(
                f"tensor {name} has scales below zero, down to {float(scales.min()):g}; download or copy the "
                "checkpoint again"
            )
        if bool((scales == 0).any()):
            self.zero_scales[piece] = name

    def _check_zeros(self, name: str, piece: MatrixPiece) -> None:
        """Refuse scales of zero of a block whose values are not, which would be lost.

        Of four bits, the scale of a group of tiny values may have become zero in a dtype of few bits.
        """
        rows, zero = slice(piece.row, piece.row + piece.rows.size), self._blocks(self.scales, piece) == 0
        if self.stated.values in (FP8, INT8) or bool(zero.all()):
            zeros = None if self.zeros is None else self._blocks(self.zeros, piece)
            groups, data = self.groups_of.get(piece), self._of(self.data, piece)[rows]
            scales = zero.float()
            lost = ScaledMatrix(self.scheme, piece.rows.size, self.place.num_columns, data, scales, zeros, groups)
            if bool(lost.dequantised(torch.float32).any()):
                raise CheckpointError(
                    f"tensor {name} has scales of zero for values that are not; download or copy the checkpoint again"
                )

    def _write_zeros(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        found = self._read_blocks(part, piece, whole).float()
        _check_finite(name, found)
        if self.zeros is not None:
            self._put_blocks(self.zeros, piece, found)
        elif bool((found != (HALF_INT4 if self.stated.values == INT4 else 0)).any()):
            raise CheckpointError(
                f"tensor {name} has zero points of its own, and the checkpoint's quantization_config says that it has "
                "none; set model.hf_overrides.quantization_config.sym=false (compressed-tensors: symmetric=false of "
                "its group's weights)"
            )

    def _write_row_scales(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        found = part.read(whole, _range(piece.rows), slice(0, 1)).float()
        self._check_sizes(name, found, LARGEST[FP8])  # by which scales of blocks, in e4m3, are multiplied
        self._check_signs(name, piece, found)
        self.row_scales_of[piece] = found.to(self.place.device)

    def _write_groups(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        found = part.read(whole, slice(0, 1), _range(piece.columns)).flatten()
        if not self.stated.is_reordered:
            size = self.stated.columns or piece.columns.total
            if not torch.equal(found.long(), torch.arange(piece.columns.start, piece.columns.stop) // size):
                raise CheckpointError(
                    f"tensor {name} has groups in an order of their own, and the checkpoint's quantization_config says "
                    "that it has none; set model.hf_overrides.quantization_config.desc_act=true"
                )
            return
        num_groups = self.scales.shape[-1]
        if len(found) and not (0 <= int(found.min()) and int(found.max()) < num_groups):
            raise CheckpointError(
                f"tensor {name} has groups from {int(found.min())} to {int(found.max())}, and there are {num_groups} "
                "(0 to one less); download or copy the checkpoint again"
            )
        self.groups_of[piece] = found.to(self.place.device, torch.int32)

    def _write_input_scale(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        found = part.read(whole, slice(0, 1), slice(0, 1)).float().reshape(())
        _check_finite(name, found)
        if float(found) <= 0:
            raise CheckpointError(
                f"tensor {name} is {float(found):g}, and activations are divided by it; download or copy the "
                "checkpoint again"
            )
        self.input_scale_of[piece] = found.to(self.place.device)

    def _write_unused(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        _check_finite(name, part.read(whole, slice(0, 1), slice(0, 1)).float())

    def _write_shape(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        found, expected = whole[...].tolist(), [piece.rows.total, piece.columns.total]
        if found != expected:
            raise CheckpointError(f"tensor {name} says {found}, and the model needs {expected}; is it the right one?")

    def _write_floats(self, name: str, part: StoredPart, piece: MatrixPiece, whole: Any) -> None:
        """Quantise this rank's part of floats by scales of whole blocks, so that all ranks have the same scales."""
        stated, rows, columns = self.stated, piece.rows, piece.columns
        around_rows = _widened(rows.start, rows.stop, stated.rows, rows.total)
        around_columns = _widened(columns.start, columns.stop, stated.columns, columns.total)
        around = whole[around_rows, around_columns].to(self.place.device, torch.float32)
        scales, zeros = scales_of(around, stated)
        _check_finite(name, scales)
        matrix = ScaledMatrix(stated, len(around), around.shape[1], around, scales, zeros)
        zero = None if zeros is None else matrix.spread(zeros)
        codes = codes_of(around, stated, matrix.spread(scales), zero)
        first, left = rows.start - around_rows.start, columns.start - around_columns.start
        self._put(piece, codes[first : first + rows.size, left : left + columns.size])
        first = around_rows.start // stated.rows if stated.rows else 0
        left = around_columns.start // stated.columns if stated.columns else 0
        for blocks, found in ((self.scales, scales), (self.zeros, zeros)):
            if blocks is not None and found is not None:
                part = StoredPart("", "scales", (), partial(_part_read, first, left))
                self._put_blocks(blocks, piece, self._read_blocks(part, piece, found))
        if self.groups is not None:
            own = torch.arange(columns.start, columns.stop, device=self.place.device)
            self.groups_of[piece] = (own // stated.columns).int()

    def _read_blocks(self, part: StoredPart, piece: MatrixPiece, whole: Any) -> Tensor:
        """The stored values of blocks, for each block of this rank's piece."""
        row_of, column_of = self._stored_rows(piece), self._stored_columns(piece)
        rows = slice(int(row_of[0]), int(row_of[-1]) + 1)
        columns = slice(int(column_of[0]), int(column_of[-1]) + 1)
        found = part.read(whole, rows, columns).to(self.place.device)
        return found[(row_of - rows.start).to(found.device)][:, (column_of - columns.start).to(found.device)]

    def _put_blocks(self, tensor: Tensor, piece: MatrixPiece, blocks: Tensor) -> None:
        self._blocks(tensor, piece).copy_(blocks)

    def _blocks(self, tensor: Tensor, piece: MatrixPiece) -> Tensor:
        """The values of blocks that belong to a piece."""
        first, num_blocks = piece.row // self.rows, -(-piece.rows.size // self.rows)
        return self._of(tensor, piece)[first : first + num_blocks]

    def _stored_rows(self, piece: MatrixPiece) -> Tensor:
        """The stored block of each of the piece's blocks along the outputs."""
        starts = torch.arange(piece.rows.start, piece.rows.stop, self.rows)
        return starts // self.stated.rows if self.stated.rows else torch.zeros_like(starts)

    def _stored_columns(self, piece: MatrixPiece) -> Tensor:
        if self.stated.is_reordered or not self.stated.columns:
            return torch.arange(self.scales.shape[-1])
        starts = torch.arange(piece.columns.start, piece.columns.stop, self.columns)
        return starts // self.stated.columns


def plain_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read, for a tensor (outputs, inputs)."""
    found: Tensor = whole[rows, columns]
    return found


def blocks_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read, for a tensor (outputs, blocks), or (outputs,) with a single block."""
    found: Tensor = whole[rows]
    return found.reshape(-1, 1) if found.ndim == 1 else found[:, columns]


def transposed_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read, for a tensor (inputs, outputs)."""
    found: Tensor = whole[columns, rows]
    return found.T


def vector_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read, for a tensor (outputs,) or (outputs, 1)."""
    found: Tensor = whole[rows]
    return found.reshape(-1, 1)


def scalar_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read, for a tensor with a single element, which holds for all rows."""
    found: Tensor = whole[...]
    return found.reshape(1, 1).expand(rows.stop - rows.start, 1)


def inverse_of(read: Read) -> Read:
    """A function that reads scales whose inverses are stored."""
    return lambda whole, rows, columns: 1 / read(whole, rows, columns).float()


def inputs_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read, for a tensor (inputs,)."""
    found: Tensor = whole[columns]
    return found.reshape(1, -1)


def _no_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    raise AssertionError("floats are written by _write_floats")


def _range(part: Any) -> slice:
    return slice(part.start, part.stop)


def _widened(start: int, stop: int, block: int, total: int) -> slice:
    """The range of whole blocks around [start, stop); the whole range if block is 0."""
    if not block:
        return slice(0, total)
    return slice(start // block * block, min(total, -(-stop // block) * block))


def _part_read(first: int, left: int, whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read, for a tensor that begins at row `first` and column `left` of the whole one."""
    found: Tensor = whole[rows.start - first : rows.stop - first, columns.start - left : columns.stop - left]
    return found


def _check_finite(name: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            f"tensor {name} has NaN or infinity among its values; download or copy the checkpoint again"
        )
