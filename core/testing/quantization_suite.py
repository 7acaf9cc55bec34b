"""The conformance suite of quantizations: subclass it in your tests, with checkpoints' tensors from `write`.

Every case fills a matrix as a rank would have it (whole, of some rows or columns, of several linears, of experts) from
whole tensors, and compares it with the values that these stand for.
Legend: as in core/contracts/quantization.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import MatrixPiece, MatrixPlace, Part, Quantization, QuantizedMatrix, StoredForm
from hookline.core.errors import CheckpointError
from hookline.core.testing.checks import check, check_close, check_contract
from hookline.core.testing.host_sync import no_host_sync

Stored = Mapping[str, Tensor]
"""The tensors of a linear in a checkpoint, by suffix of its name, e.g. "weight_scale"."""


class QuantizationSuite:
    """`class TestMine(QuantizationSuite): def make(self, form): return Mine(MyConfig(), form)`, and `write`.

    stated: the quantization_config of checkpoints. num_rows, num_columns: of the suite's linears, multiples of the
    steps. row_step, column_step: every rank's part is a multiple of these, for a format that packs neighbours into one
    word which cannot be split. name: of the linears, which the form must quantise. tolerance: of values that are
    dequantised in float32. device: where matrices are allocated.
    """

    stated: ClassVar[Mapping[str, Any]] = {}
    num_rows: ClassVar[int] = 48
    num_columns: ClassVar[int] = 64
    row_step: ClassVar[int] = 1
    column_step: ClassVar[int] = 1
    name: ClassVar[str] = "model.layers.0.mlp.down_proj"
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-5

    def make(self, form: StoredForm) -> Any:
        """The quantization under test."""
        raise NotImplementedError("return your quantization from make()")

    def write(self, values_OD: Tensor) -> tuple[Stored, Tensor]:
        """The tensors that a checkpoint stores for a linear with these values, and the float32 values they stand for.

        Linears are joined, so if a format orders inputs, the order must not depend on the values.
        """
        raise NotImplementedError("return stored tensors and the values that they stand for from write()")

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract("quantization", type(self._made()))

    def test_a_whole_matrix_is_what_was_stored(self) -> None:
        """A dequantised matrix has its values, its shape and the requested dtype."""
        stored, meant = self._stored()
        matrix = self._filled([self._piece()], {self.name: stored})
        sizes = matrix.num_rows, matrix.num_columns
        check(sizes == (self.num_rows, self.num_columns), f"its matrix says {sizes}")
        check(matrix.num_experts is None, f"its matrix of no experts says num_experts={matrix.num_experts}")
        check_close("a whole matrix", matrix.dequantised(torch.float32), meant, self.tolerance)
        halves = matrix.dequantised(torch.bfloat16)
        check(halves.dtype == torch.bfloat16, f"asked for bfloat16, dequantised gives {halves.dtype}")

    def test_each_ranks_rows_are_those_of_the_whole(self) -> None:
        """Of two, three and four ranks; a boundary may lie within a block."""
        stored, meant = self._stored()
        for rows in self._parts(self.num_rows, self.row_step):
            matrix = self._filled([self._piece(rows=rows)], {self.name: stored})
            what = f"the rows {rows.start} to {rows.stop} of {rows.total}"
            check_close(what, matrix.dequantised(torch.float32), meant[rows.start : rows.stop], self.tolerance)

    def test_each_ranks_columns_are_those_of_the_whole(self) -> None:
        """The same for linears whose inputs are split over the ranks."""
        stored, meant = self._stored()
        for columns in self._parts(self.num_columns, self.column_step):
            matrix = self._filled([self._piece(columns=columns)], {self.name: stored})
            what = f"the columns {columns.start} to {columns.stop} of {columns.total}"
            check_close(what, matrix.dequantised(torch.float32), meant[:, columns.start : columns.stop], self.tolerance)

    def test_joined_linears_lie_one_below_the_other(self) -> None:
        """As queries, keys and values do, of which a rank has unlike parts; rows behind them are padding."""
        writes, first, pieces = {}, 0, []
        for place, rows in enumerate(self._parts(self.num_rows, self.row_step)[:3]):
            name = f"{self.name}.{place}" if place else self.name
            writes[name] = self._stored(seed=place)
            pieces.append(self._piece(name, first, rows))
            first += rows.size
        stored = {name: parts for name, (parts, _) in writes.items()}
        expected = [writes[one.name][1][one.rows.start : one.rows.stop] for one in pieces]
        matrix = self._filled(pieces, stored, padding=self.row_step)
        found = matrix.dequantised(torch.float32)[: sum(one.rows.size for one in pieces)]
        check_close("joined linears", found, torch.cat(expected), self.tolerance)

    def test_experts_have_their_own_values(self) -> None:
        """Two experts, gate above up; each expert's matrix is that of `of_expert`."""
        halves = [(expert, half, f"{self.name}.{expert}.{half}") for expert in (0, 1) for half in (0, 1)]
        writes = {name: self._stored(2 * expert + half) for expert, half, name in halves}
        pieces = [self._piece(name, half * self.num_rows, expert=expert) for expert, half, name in halves]
        stored = {name: parts for name, (parts, _) in writes.items()}
        matrix = self._filled(pieces, stored, num_experts=2)
        check(matrix.num_experts == 2, f"its matrix of two experts says num_experts={matrix.num_experts}")
        together = matrix.dequantised(torch.float32)
        for expert in (0, 1):
            meant = torch.cat([writes[f"{self.name}.{expert}.{half}"][1] for half in (0, 1)])
            check_close(f"expert {expert}", together[expert], meant, self.tolerance)
            alone = matrix.of_expert(expert).dequantised(torch.float32)
            check_close(f"of_expert({expert})", alone, meant, self.tolerance)

    def test_targets_have_the_shapes_of_what_is_stored(self) -> None:
        """Sizes of 1 aside, whatever part of the tensor a rank reads."""
        stored, _ = self._stored()
        rows = self._parts(self.num_rows, self.row_step)[1]
        for name, target in self._loading([self._piece(rows=rows)]).targets().items():
            check(name.startswith(f"{self.name}."), f"{name} is no tensor of {self.name}")
            found = stored.get(name.removeprefix(f"{self.name}."))
            check(found is not None, f"{name} is asked for, and write() stores {', '.join(stored)}")
            assert found is not None
            shapes = [[size for size in shape if size != 1] for shape in (target.shape, found.shape)]
            check(shapes[0] == shapes[1], f"{name} has shape {list(target.shape)}, and stored is {list(found.shape)}")

    def test_nan_among_scales_is_refused_by_name(self) -> None:
        """Nobody would find the cause in a model's answers."""
        for suffix, tensor in self._stored()[0].items():
            if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
                continue
            stored = {one: part.contiguous().clone() for one, part in self._stored()[0].items()}
            stored[suffix].view(-1)[0] = torch.nan
            try:
                self._filled([self._piece()], {self.name: stored})
            except CheckpointError as error:
                check(f"{self.name}.{suffix}" in str(error), f"NaN in {suffix} is refused without its name: {error}")
                continue
            raise AssertionError(f"NaN in {self.name}.{suffix} is loaded without an error")

    def test_a_product_of_its_own_is_that_of_the_matrix(self) -> None:
        """If its scheme says that matrices multiply by themselves; rows have the model's dtype."""
        stored, meant = self._stored()
        matrix = self._filled([self._piece()], {self.name: stored})
        if not matrix.scheme.multiplies:
            return
        x_TD = torch.randn(3, self.num_columns, generator=torch.Generator().manual_seed(7)).to(self.device)
        found = matrix.linear(x_TD.bfloat16())
        check(found.dtype == torch.bfloat16, f"its product with rows of bfloat16 is of {found.dtype}")
        expected = x_TD.cpu() @ meant.cpu().T
        check_close("its product", matrix.linear(x_TD).cpu(), expected, max(self.tolerance, 1e-4) * self.num_columns)

    def test_dequantising_never_waits_for_the_host(self) -> None:
        """It may be computed within a step."""
        matrix = self._filled([self._piece()], {self.name: self._stored()[0]})
        matrix.dequantised(torch.float32)
        with torch.no_grad(), no_host_sync("dequantised"):
            matrix.dequantised(torch.float32)

    # ------------------------------------------------------------------------------------------------------ helpers

    def _made(self, names: Sequence[str] = ()) -> Quantization:
        stored, _ = self._stored()
        dtypes = {f"{name}.{suffix}": _DTYPES.get(one.dtype, "") for name in names for suffix, one in stored.items()}
        quantization: Quantization = self.make(StoredForm(self.stated, dtypes))
        return quantization

    def _stored(self, seed: int = 0) -> tuple[Stored, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        # Rows, columns and signs differ in size, so that each block has another scale and zero point.
        values_OD = torch.randn(self.num_rows, self.num_columns, generator=generator) + 0.3
        values_OD *= torch.linspace(0.5, 2, self.num_rows).unsqueeze(1) * torch.linspace(1, 3, self.num_columns)
        return self.write(values_OD)

    def _piece(
        self,
        name: str = "",
        row: int = 0,
        rows: Part | None = None,
        columns: Part | None = None,
        expert: int | None = None,
    ) -> MatrixPiece:
        whole = Part(self.num_rows, 0, self.num_rows), Part(self.num_columns, 0, self.num_columns)
        return MatrixPiece(name or self.name, row, rows or whole[0], columns or whole[1], expert)

    def _parts(self, total: int, step: int) -> list[Part]:
        """Parts of ranks: halves, thirds and quarters, as near as the step allows."""
        bounds = [(0, 1, 2), (1, 2, 2), (1, 2, 3), (2, 3, 3), (3, 4, 4), (0, 1, 4)]
        cuts = [
            tuple(total * place // parts // step * step for place in (start, stop)) for start, stop, parts in bounds
        ]
        return [Part(total, start, stop) for start, stop in cuts if stop > start]

    def _loading(self, pieces: Sequence[MatrixPiece], num_experts: int | None = None, padding: int = 0) -> Any:
        num_rows = max(piece.row + piece.rows.size for piece in pieces) + padding
        place = MatrixPlace(num_rows, pieces[0].columns.size, torch.device(self.device), num_experts)
        return self._made([piece.name for piece in pieces]).matrix(pieces, place)

    def _filled(
        self,
        pieces: Sequence[MatrixPiece],
        stored: Mapping[str, Stored],
        num_experts: int | None = None,
        padding: int = 0,
    ) -> QuantizedMatrix:
        loading = self._loading(pieces, num_experts, padding)
        whole = {f"{name}.{suffix}": one for name, parts in stored.items() for suffix, one in parts.items()}
        for name, target in loading.targets().items():
            check(name in whole, f"{name} is asked for, and write() does not store it")
            target.fill(whole[name])
        matrix: QuantizedMatrix = loading.loaded()
        return matrix


_DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}
"""safetensors' names of dtypes."""
