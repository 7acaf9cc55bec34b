"""Weights of layers as plain tensors in the model's dtype, multiplied by the runtime's kernels.

Layers use them unless `Runtime.weights` has another factory.
Legend: T tokens, D input features of this rank, O output features of this rank, F intermediate features of this rank,
X experts, A experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import MatrixPiece, WeightTarget, is_offered
from hookline.core.layers.expert_products import plain_expert_mlp

if TYPE_CHECKING:
    from hookline.core.contracts import Activation, Kernels, Ranks, Runtime


class PlainWeight:
    """A tensor (O, D). Implements hookline.core.contracts.Weight."""

    prepared: Any = None
    """See Weight: there is none."""

    def __init__(self, matrix_OD: Tensor, runtime: Runtime) -> None:
        """Keep the tensor."""
        self.matrix_OD, self.kernels, self.ranks = matrix_OD, runtime.kernels, runtime.ranks

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Weight."""
        return self.kernels.linear(x_TD, self.matrix_OD, bias_O)

    def linear_silu_mul(self, x_TD: Tensor, then: Any = None) -> Tensor:
        """See Weight."""
        return self.kernels.linear_silu_mul(x_TD, self.matrix_OD)

    def linear_add_rms_norm(
        self, x_TD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor, eps: float,
        then: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Weight."""
        return self.ranks.linear_add_rms_norm(
            self.kernels, x_TD, self.matrix_OD, bias_O, residual_TO, norm_weight_O, eps
        )

    def targets(self, pieces: Sequence[MatrixPiece]) -> dict[str, WeightTarget]:
        """See Weight."""
        return plain_targets(self.matrix_OD, pieces)

    def plain(self) -> Tensor:
        """See Weight."""
        return self.matrix_OD


class HeadWeight(PlainWeight):
    """The tensor of an output head, which torch multiplies."""

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Weight."""
        return functional.linear(x_TD, self.matrix_OD, bias_O)


class SummedExperts:
    """Experts whose sum over ranks is one step and the norm behind it another, unless a subclass fuses them.

    kernels, ranks: the runtime's own kernels and ranks.
    """

    kernels: Kernels
    ranks: Ranks

    def mlp(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """See ExpertWeights."""
        raise NotImplementedError

    def mlp_add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ExpertWeights."""
        partial_TD = self.mlp(x_TD, expert_TA, weight_TA)
        return self.ranks.add_rms_norm(self.kernels, partial_TD, residual_TD, norm_weight_D, eps)


class PlainExperts(SummedExperts):
    """Two tensors (X, 2F, D) and (X, D, F). Implements hookline.core.contracts.ExpertWeights."""

    def __init__(
        self, gate_up_XFD: Tensor, down_XDF: Tensor, runtime: Runtime, activation: Activation = "silu"
    ) -> None:
        """Keep the tensors."""
        self.gate_up_XFD, self.down_XDF = gate_up_XFD, down_XDF
        self.kernels, self.ranks = runtime.kernels, runtime.ranks
        own_mlp = self.kernels.expert_mlp if activation == "silu" else self.kernels.gelu_expert_mlp
        self._mlp = own_mlp if is_offered(own_mlp) else partial(plain_expert_mlp, activation=activation)
        self.has_mlp = activation == "silu" and is_offered(own_mlp)
        """Whether the kernels compute it, with silu."""

    def mlp(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """See ExpertWeights."""
        return self._mlp(x_TD, expert_TA, weight_TA, self.gate_up_XFD, self.down_XDF)

    def mlp_add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ExpertWeights. Fused with either sum where kernels or ranks can."""
        if self.ranks.size == 1 and self.has_mlp:
            given = x_TD, expert_TA, weight_TA, self.gate_up_XFD, self.down_XDF
            return self.kernels.expert_mlp_add_rms_norm(*given, residual_TD, norm_weight_D, eps)
        return super().mlp_add_rms_norm(x_TD, expert_TA, weight_TA, residual_TD, norm_weight_D, eps)

    def targets(self, gate_up: Sequence[MatrixPiece], down: Sequence[MatrixPiece]) -> dict[str, WeightTarget]:
        """See ExpertWeights."""
        return {**plain_targets(self.gate_up_XFD, gate_up), **plain_targets(self.down_XDF, down)}


class PlainWeights:
    """Allocates plain weights, uninitialised. Implements hookline.core.contracts.WeightFactory."""

    def matrix(self, runtime: Runtime, num_rows: int, num_columns: int) -> PlainWeight:
        """See WeightFactory. A CPU multiplies one row a quarter to a third faster by a matrix stored transposed."""
        if runtime.device.type == "cpu":
            return PlainWeight(empty_parameter(runtime, num_columns, num_rows).t(), runtime)
        return PlainWeight(empty_parameter(runtime, num_rows, num_columns), runtime)

    def head(self, runtime: Runtime, num_rows: int, num_columns: int) -> PlainWeight:
        """See WeightFactory."""
        return head_weight(empty_parameter(runtime, num_rows, num_columns), runtime)

    def experts(
        self, runtime: Runtime, num_experts: int, hidden: int, inner: int, activation: Activation = "silu"
    ) -> PlainExperts:
        """See WeightFactory."""
        gate_up_XFD = empty_parameter(runtime, num_experts, 2 * inner, hidden)
        return PlainExperts(gate_up_XFD, empty_parameter(runtime, num_experts, hidden, inner), runtime, activation)

    def rename(self, tensor_name: Callable[[str], str | None]) -> None:
        """See WeightFactory. Plain weights have the model's names."""


PLAIN = PlainWeights()
"""The factory that layers use if the runtime has none."""


def head_weight(matrix_VD: Tensor, runtime: Runtime) -> PlainWeight:
    """The weight of an output head, which kernels multiply only where results must not depend on the batch."""
    return PlainWeight(matrix_VD, runtime) if runtime.batch_invariant else HeadWeight(matrix_VD, runtime)


def plain_targets(matrix: Tensor, pieces: Sequence[MatrixPiece]) -> dict[str, WeightTarget]:
    """`name.weight` -> its rows of a matrix (O, D), or of an expert's in (X, O, D)."""
    targets: dict[str, WeightTarget] = {}
    for piece in pieces:
        rows, columns = piece.rows, piece.columns
        matrix_OD = matrix if piece.expert is None else matrix[piece.expert]
        view_OD = matrix_OD[piece.row : piece.row + rows.size]
        dim, part = (0, rows) if columns.size == columns.total else (1, columns)
        assert rows.size == rows.total or columns.size == columns.total, piece
        target = WeightTarget.shard(view_OD, dim, part)
        name, first = f"{piece.name}.weight", targets.get(f"{piece.name}.weight")
        targets[name] = target if first is None else replace(first, more=(*first.more, target))
    return targets


def empty_parameter(runtime: Runtime, *shape: int) -> Tensor:
    """An uninitialised parameter where the runtime wants it."""
    return torch.empty(*shape, device=runtime.device, dtype=runtime.dtype)
