"""Quantizations that break their contract, each in one way; beside them a plain one, which keeps it.

Stored are `X.codes` (O, D) uint8, `X.scales` and `X.zeros` (O, G), and `X.groups` (D,), the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import (
    INT8,
    MatrixPiece,
    MatrixPlace,
    Quantization,
    ScaledMatrix,
    Scheme,
    StoredForm,
    WeightTarget,
)
from hookline.core.errors import CheckpointError

GROUP = 8
"""Inputs of a group."""
SCHEME = Scheme(INT8, 1, GROUP, has_zeros=True, is_reordered=True)


def write(values_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What is stored of a linear, and what it stands for; the inputs' order depends on their number alone."""
    num_rows, num_columns = values_OD.shape
    groups = (torch.arange(num_columns) // GROUP)[torch.randperm(num_columns, generator=torch.manual_seed(1))]
    scales, zeros = torch.zeros(num_rows, num_columns // GROUP), torch.zeros(num_rows, num_columns // GROUP)
    for group in range(num_columns // GROUP):
        own = values_OD[:, groups == group]
        scales[:, group] = (own.amax(1) - own.amin(1)) / 127
        zeros[:, group] = (-own.amin(1) / scales[:, group]).round()
    codes = ((values_OD / scales[:, groups]).round() + zeros[:, groups]).clamp(0, 127)
    meant = (codes - zeros[:, groups]) * scales[:, groups]
    return {"codes": codes.to(torch.uint8), "scales": scales, "zeros": zeros, "groups": groups.int()}, meant


class PlainLoading:
    scheme = SCHEME

    def __init__(self, quantization: PlainQuantization, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> None:
        self.quantization, self.pieces, self.place = quantization, pieces, place
        lead = () if place.num_experts is None else (place.num_experts,)
        num_groups = pieces[0].columns.total // GROUP
        self.codes = torch.zeros((*lead, place.num_rows, place.num_columns), dtype=torch.int8)
        self.scales, self.zeros = (torch.zeros((*lead, place.num_rows, num_groups)) for _ in range(2))
        self.groups = torch.zeros((*lead, place.num_columns), dtype=torch.int32)

    def targets(self) -> Mapping[str, WeightTarget]:
        targets = {}
        for piece in self.pieces:
            rows, columns, blocks = piece.rows.total, piece.columns.total, piece.columns.total // GROUP
            for suffix, view, shape, dtypes in (
                ("codes", self.codes, (rows, columns), ("U8",)),
                ("scales", self.scales, (rows, blocks), ()),
                ("zeros", self.zeros, (rows, blocks), ()),
                ("groups", self.groups, (columns,), ("I32",)),
            ):
                name = f"{piece.name}.{suffix}"
                fill = partial(self._write, name, suffix, view if piece.expert is None else view[piece.expert], piece)
                targets[name] = WeightTarget.converted(view, shape, fill, dtypes)
        return targets

    def loaded(self) -> ScaledMatrix:
        sizes = self.place.num_rows, self.place.num_columns
        return ScaledMatrix(self.scheme, *sizes, self.codes, self.scales, self.zeros, self.groups)

    def _write(self, name: str, suffix: str, view: Tensor, piece: MatrixPiece, whole: Any) -> None:
        rows, columns = slice(piece.rows.start, piece.rows.stop), slice(piece.columns.start, piece.columns.stop)
        if suffix == "groups":
            view.copy_(self.quantization.groups(whole, columns))
            return
        found = whole[rows, columns] if suffix == "codes" else self.quantization.blocks(suffix, whole, rows)
        if not bool(found.isfinite().all()) and self.quantization.checks:
            raise CheckpointError(f"tensor {name} has NaN or infinity among its values")
        view[piece.row : piece.row + piece.rows.size] = found


class PlainQuantization(Quantization):
    checks = True

    def __init__(self, config: Any, form: StoredForm) -> None:
        pass

    def stores(self, name: str) -> Scheme | None:
        return SCHEME

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> PlainLoading:
        return PlainLoading(self, pieces, place)

    def blocks(self, suffix: str, whole: Any, rows: slice) -> Tensor:
        found: Tensor = whole[rows]
        return found

    def groups(self, whole: Any, columns: slice) -> Tensor:
        found: Tensor = whole[columns]
        return found


class TakesTheScalesOfTheNeighboursShard(PlainQuantization):
    def blocks(self, suffix: str, whole: Any, rows: slice) -> Tensor:
        found: Tensor = whole[: rows.stop - rows.start] if suffix == "scales" else whole[rows]
        return found


class HasZeroPointsOffByOne(PlainQuantization):
    def blocks(self, suffix: str, whole: Any, rows: slice) -> Tensor:
        found: Tensor = whole[rows]
        return found + 1 if suffix == "zeros" else found


class IgnoresTheOrderOfInputs(PlainQuantization):
    def groups(self, whole: Any, columns: slice) -> Tensor:
        return torch.arange(columns.start, columns.stop) // GROUP


class CountsGroupsFromTheShard(PlainQuantization):
    def groups(self, whole: Any, columns: slice) -> Tensor:
        found: Tensor = whole[: columns.stop - columns.start]
        return found


class LoadsNaN(PlainQuantization):
    checks = False


class GivesEveryExpertTheFirst(PlainQuantization):
    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> PlainLoading:
        return PlainLoading(self, [replace(piece, expert=piece.expert and 0) for piece in pieces], place)


class JoinsFromTheFirstRow(PlainQuantization):
    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> PlainLoading:
        return PlainLoading(self, [replace(piece, row=0) for piece in pieces], place)


@dataclass(frozen=True, eq=False)
class HalvedMatrix(ScaledMatrix):
    def linear(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.dequantised(x_TD.dtype).T / 2


class HalvedLoading(PlainLoading):
    scheme = replace(SCHEME, multiplies=True)

    def loaded(self) -> ScaledMatrix:
        return HalvedMatrix(**vars(super().loaded()))


class MultipliesByAnotherMatrix(PlainQuantization):
    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> PlainLoading:
        return HalvedLoading(self, pieces, place)


FAULTS: dict[type, str] = {
    TakesTheScalesOfTheNeighboursShard: "test_each_ranks_rows_are_those_of_the_whole: the rows 24 to 48 of 48 is wrong",
    HasZeroPointsOffByOne: "test_a_whole_matrix_is_what_was_stored: a whole matrix is wrong",
    IgnoresTheOrderOfInputs: "test_a_whole_matrix_is_what_was_stored: a whole matrix is wrong",
    CountsGroupsFromTheShard: "test_each_ranks_columns_are_those_of_the_whole: the columns 32 to 64 of 64 is wrong",
    LoadsNaN: "test_nan_among_scales_is_refused_by_name: is loaded without an error",
    GivesEveryExpertTheFirst: "test_experts_have_their_own_values: expert 0 is wrong",
    JoinsFromTheFirstRow: "test_joined_linears_lie_one_below_the_other: joined linears is wrong",
    MultipliesByAnotherMatrix: "test_a_product_of_its_own_is_that_of_the_matrix: its product is wrong",
}
