"""Matrices in few bits, and the products that kernels make with them.

Legend: T tokens, D inputs, O outputs, R and C the blocks of a scale along outputs and inputs, X experts, A experts of a
token, F intermediate features of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.norms import NormsAndGates
from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    from torch import Tensor, dtype

FP8, INT8, INT4, FP4 = "e4m3", "i8", "i4", "e2m1"
"""Values of Scheme.values that `ScaledMatrix` has: floats of 8 bits, integers of 8 and of 4 bits, floats of 4 bits."""
OFFSETS = {"i8 + offset": INT8, "i4 + offset": INT4}
"""For each kind of values of an `OffsetMatrix` (see Scheme.values), the kind of values of the ScaledMatrix in it."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes of e2m1."""
HALF_INT4 = 8
"""The zero point of int4 values without zero points of their own: code 0 stands for -8, code 15 for 7."""


@dataclass(frozen=True)
class Scheme:
    """How the values of a matrix are stored: the facts by which kernels choose.

    values: FP8, INT8, INT4 or FP4, which are a ScaledMatrix; one of OFFSETS; or a name that a plugin defines.
    multiplies: whether matrices of the scheme implement `QuantizedMatrix.linear`, which layers call where the kernels
    do not compute the scheme.
    else_plain: whether matrices that the kernels do not compute are dequantised when they are loaded; otherwise a GPU
    refuses such a checkpoint, and a CPU dequantises them for each product.
    rows, columns: outputs and inputs of the block that shares a scale; 0 means all of them. (128, 128): blocks;
    (1, 0): one scale for each output; (1, 128): groups of 128 inputs.
    has_zeros: whether each block has its own zero point. is_reordered: whether the inputs of a group are not
    neighbours (GPTQ's act-order). activations: how the checkpoint was made to have activations quantised: "" (not at
    all), "dynamic", or "static" by ScaledMatrix.input_scale. Kernels may do so, or leave activations as they are.
    """

    values: str
    rows: int = 1
    columns: int = 0
    has_zeros: bool = False
    is_reordered: bool = False
    activations: str = ""
    multiplies: bool = False
    else_plain: bool = False

    def __str__(self) -> str:
        """In words, for messages."""
        rows, columns = self.rows or "all", self.columns or "all"
        further = [" with zero points"] * self.has_zeros + [" in an order of its own"] * self.is_reordered
        return f"{self.values} with a scale for each {rows} x {columns}{''.join(further)}"


class QuantizedMatrix(Protocol):
    """A matrix (O, D) of this rank in few bits, or one for each expert (X, O, D). For classes to extend."""

    scheme: Scheme
    """How its values are stored."""
    num_rows: int
    """O."""
    num_columns: int
    """D."""

    @property
    def num_experts(self) -> int | None:
        """X; None for a single matrix (O, D)."""
        ...

    def dequantised(self, dtype: dtype) -> Tensor:
        """The matrix in this dtype, (O, D) or (X, O, D), in new memory.

        Device: no host sync; graph-safe.
        """
        ...

    def of_expert(self, index: int) -> QuantizedMatrix:
        """The matrix (O, D) of one expert, in the same memory."""
        ...

    @optional
    def linear(self, x_TD: Tensor) -> Tensor:
        """Its product with rows, x @ W.T: (T, D) -> (T, O) in the rows' dtype; see Scheme.multiplies.

        Device: no host sync; graph-safe, unless the engine runs without CUDA graphs.
        """
        raise AssertionError("left out")


@dataclass(frozen=True, eq=False)
class ScaledMatrix(QuantizedMatrix):
    """A matrix with elements (value - zero point) * scale; every tensor may have a first dimension X, of experts.

    num_rows: O. num_columns: D.
    data: FP8 (O, D) float8_e4m3fn; INT8 (O, D) int8; INT4 and FP4 (O, ceil(D / 2)) uint8, the even column in the low
    half of a byte. INT4 values are 0 to 15; FP4 values are codes of FP4_VALUES.
    scales_RC: (ceil(O / rows), ceil(D / columns)) for the scheme's blocks, float32.
    zeros_RC: of the same shape, float32 with whole numbers; None: HALF_INT4 for INT4, else 0.
    group_D: (D,) int32, the column of scales_RC of each input where the scheme is reordered; else None.
    input_scale: () float32, of static activations: activations are divided by it before they are rounded; else None.
    All are contiguous, on one device, and keep their addresses and values while steps run.
    """

    scheme: Scheme
    num_rows: int
    num_columns: int
    data: Tensor
    scales_RC: Tensor
    zeros_RC: Tensor | None = None
    group_D: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def num_experts(self) -> int | None:
        """See QuantizedMatrix."""
        return len(self.data) if self.data.ndim == 3 else None

    def dequantised(self, dtype: dtype) -> Tensor:
        """See QuantizedMatrix. Computed in float32."""
        values = self._values()
        if self.zeros_RC is not None:
            values.sub_(self.spread(self.zeros_RC))
        elif self.scheme.values == INT4:
            values.sub_(HALF_INT4)
        return values.mul_(self.spread(self.scales_RC)).to(dtype)

    def of_expert(self, index: int) -> ScaledMatrix:
        """See QuantizedMatrix."""
        return replace(
            self,
            data=self.data[index],
            scales_RC=self.scales_RC[index],
            zeros_RC=None if self.zeros_RC is None else self.zeros_RC[index],
            group_D=None if self.group_D is None else self.group_D[index],
            input_scale=None if self.input_scale is None else self.input_scale[index],
        )

    def _values(self) -> Tensor:
        """The stored numbers in float32, in new memory: (O, D)."""
        if self.scheme.values in (FP8, INT8):
            return self.data.float()
        halves = self.data.unsqueeze(-1) >> self.data.new_tensor([0, 4])
        codes = (halves & 15).flatten(-2)[..., : self.num_columns]
        if self.scheme.values == INT4:
            return codes.float()
        return self.scales_RC.new_tensor(FP4_VALUES)[codes.long()]

    def spread(self, of_blocks: Tensor) -> Tensor:
        """Repeat a value of each block for its elements: (R, C) -> (O, D), or (O, 1) if a block spans all columns."""
        rows, columns = self.scheme.rows or self.num_rows, self.scheme.columns
        found = of_blocks
        if rows > 1:
            found = found.repeat_interleave(rows, -2)[..., : self.num_rows, :]
        if self.group_D is not None:
            index = self.group_D.long().unsqueeze(-2).expand(*found.shape[:-1], self.num_columns)
            return found.gather(-1, index)
        return found.repeat_interleave(columns, -1)[..., : self.num_columns] if columns else found


@dataclass(frozen=True, eq=False)
class OffsetMatrix(QuantizedMatrix):
    """A ScaledMatrix plus an offset for each group of inputs, where a minimum is no whole number of scales (k-quants).

    scheme: of the scaled matrix, with values from OFFSETS. scaled: (O, D), without zero points. offsets_OC: of its
    groups, (O, D / columns) float32. With an axis of experts before these, kernels are not asked to compute it.
    """

    scheme: Scheme
    scaled: ScaledMatrix
    offsets_OC: Tensor

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """O."""
        return self.scaled.num_rows

    @property
    def num_columns(self) -> int:  # type: ignore[override]
        """D."""
        return self.scaled.num_columns

    @property
    def num_experts(self) -> int | None:
        """See QuantizedMatrix."""
        return self.scaled.num_experts

    def dequantised(self, dtype: dtype) -> Tensor:
        """See QuantizedMatrix."""
        return self.scaled.dequantised(self.offsets_OC.dtype).add_(self.scaled.spread(self.offsets_OC)).to(dtype)

    def of_expert(self, index: int) -> OffsetMatrix:
        """See QuantizedMatrix."""
        return replace(self, scaled=self.scaled.of_expert(index), offsets_OC=self.offsets_OC[index])


class QuantizedProducts(NormsAndGates, Protocol):
    """Products with quantised matrices. `Kernels` extends it; a class may leave all of them out.

    A checkpoint in a scheme that the kernels do not compute must be dequantised when it is loaded on a GPU; on a CPU
    the layers dequantise the whole matrix for each product.
    """

    # ------------------------------------------------------------------------------------ what a class may leave out

    @optional
    def computes(self, scheme: Scheme, num_rows: int, num_columns: int) -> bool:
        """Whether this class computes products with matrices (O, D) of a scheme; asked before weights are loaded.

        For experts, it is called for both matrices of an expert, and the class must have `quantized_expert_mlp`. It is
        not called for experts with offsets, which are plain.
        """
        return False

    @optional
    def prepare_weight(self, weight: QuantizedMatrix) -> Any:
        """Convert a loaded matrix to the layout of this class's products, which get the result as `weight`.

        Called once for each matrix that it `computes`. The result may have any type with num_rows and num_columns. Core
        does not keep the given matrix.
        """
        return weight

    @optional
    def quantized_linear(self, x_TD: Any, weight: Any, bias_O: Tensor | None) -> Tensor:
        """`linear` with a quantised matrix: (T, D) -> (T, O).

        x_TD: rows that lie in memory as for `linear`, or the result of a method whose argument `then` was this weight.
        """
        raise AssertionError("left out")

    @optional
    def quantized_linear_silu_mul(self, x_TD: Any, weight: Any, then: Any = None) -> Any:
        """`linear_silu_mul` with a quantised matrix (2F, D), gate then up: (T, D) -> (T, F).

        x_TD: as for quantized_linear. then: the only quantised matrix that the result is multiplied with. The result
        may then have any type with a shape and a length, e.g. rows quantised for that product.
        """
        return self.silu_mul(self.quantized_linear(x_TD, weight, None))

    @optional
    def quantized_linear_add_rms_norm(
        self, x_TD: Any, weight: Any, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor, eps: float,
        then: Any = None,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        """`linear_add_rms_norm` with a quantised matrix. May overwrite the residual.

        x_TD: as for quantized_linear. then: as for quantized_linear_silu_mul, for the norm.
        """
        product_TO = self.quantized_linear(x_TD, weight, bias_O)
        return self.add_rms_norm(product_TO, residual_TO, norm_weight_O, eps)

    @optional
    def quantized_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: Any, down: Any
    ) -> Tensor:
        """`expert_mlp` with quantised matrices (X, 2F, D) and (X, D, F): (T, D) -> (T, D).

        If it is left out, `hookline.core.layers` computes it expert by expert with dequantised matrices.
        """
        raise AssertionError("left out")

    @optional
    def quantized_expert_mlp_add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: Any, down: Any, residual_TD: Tensor,
        norm_weight_D: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """add_rms_norm of `quantized_expert_mlp`, which the class must have, and the residual."""
        out_TD = self.quantized_expert_mlp(x_TD, expert_TA, weight_TA, gate_up, down)
        return self.add_rms_norm(out_TD, residual_TD, norm_weight_D, eps)
