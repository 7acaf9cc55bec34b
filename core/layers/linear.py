"""Tensor-parallel linears, each built for one rank of a group of any size.

core/layers/vocab.py has embedding and head, core/layers/experts.py experts and their router.

Their weights come from the runtime's factory, core/layers/weights.py without one, and know how they are multiplied. A
model hands them the names of its tensors and gets `WeightTarget`s back.
Concatenated (or summed) over the ranks, the results equal the plain layer's. They are no `nn.Module`s, since a
module's call costs a microsecond and nothing here needs training. Parameters are left uninitialised.
Legend: T tokens, D input features of this rank, O output features of this rank, C = (H + 2K) * E.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import Activation, MatrixPiece, Part, Runtime, WeightTarget, is_offered
from hookline.core.distributed.partition import even_part, head_parts
from hookline.core.layers.weights import PLAIN, PlainWeight, empty_parameter


class ColumnParallelLinear:
    """x @ W.T + b with the output features split over the ranks; no communication.

    in_features, out_features: of the whole layer. weight, bias_O: this rank's rows; bias_O None without a bias.
    Shapes: x_TD (T, D) -> (T, O); concatenated over the ranks it is the plain layer's output.
    Raises: ConfigError if the ranks do not divide the output features.
    """

    def __init__(self, in_features: int, out_features: int, runtime: Runtime, *, bias: bool = False) -> None:
        """Allocate this rank's rows, uninitialised, on runtime.device."""
        self._allocate(in_features, [even_part(out_features, runtime.ranks, "output features")], runtime, bias)

    def _allocate(self, in_features: int, parts: Sequence[Part], runtime: Runtime, bias: bool) -> None:
        num_rows = sum(part.size for part in parts)
        self.parts, self.kernels, self.columns = tuple(parts), runtime.kernels, Part(in_features, 0, in_features)
        self.weight = (runtime.weights or PLAIN).matrix(runtime, num_rows, in_features)
        self.bias_O = empty_parameter(runtime, num_rows) if bias else None

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Apply this rank's rows: (T, D) -> (T, O)."""
        return self.weight.linear(x_TD, self.bias_O)

    @property
    def weight_OD(self) -> Tensor:
        """The rank's rows in the model's dtype; see Weight.plain."""
        return self.weight.plain()

    @property
    def reads(self) -> Any:
        """The quantised matrix that alone multiplies this layer's input; None if there is none."""
        return self.weight.prepared

    def targets(self, *names: str) -> dict[str, WeightTarget]:
        """`name.weight` (and `name.bias`) -> this rank's rows, for one name per packed matrix, in their order."""
        targets = self.weight.targets(
            [
                MatrixPiece(name, first, part, self.columns)
                for name, first, part in zip(names, self._firsts(), self.parts, strict=True)
            ]
        )
        biases = zip(names, self._biases(), strict=True) if self.bias_O is not None else ()
        return {**targets, **{f"{name}.bias": target for name, target in biases}}

    def joined_targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.weight` (and `name.bias`) -> this rank's rows of one tensor that holds all packed matrices in order."""
        total = sum(part.total for part in self.parts)
        starts = accumulate((part.total for part in self.parts), initial=0)
        targets = self.weight.targets(
            [
                MatrixPiece(name, first, Part(total, start + part.start, start + part.stop), self.columns)
                for first, start, part in zip(self._firsts(), starts, self.parts, strict=False)
            ]
        )
        return targets if self.bias_O is None else {**targets, f"{name}.bias": WeightTarget.joined(self._biases())}

    def _firsts(self) -> list[int]:
        """The first row of each packed matrix."""
        return list(accumulate((part.size for part in self.parts[:-1]), initial=0))

    def _biases(self) -> list[WeightTarget]:
        assert self.bias_O is not None
        views = torch.split(self.bias_O, [part.size for part in self.parts])
        return [
            WeightTarget.shard(view_O, 0, part, init="zeros") for view_O, part in zip(views, self.parts, strict=True)
        ]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel matrices of the same input in one product, e.g. gate and up.

    out_features: of each whole matrix.
    Shapes: x_TD (T, D) -> (T, O), this rank's columns of the first matrix, then of the second, and so on.
    Raises: ConfigError, naming `what`, if the ranks do not divide one of the sizes.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], runtime: Runtime, *, what: str, bias: bool = False
    ) -> None:
        """Allocate this rank's rows of all matrices as one, uninitialised, on runtime.device."""
        self._allocate(in_features, [even_part(size, runtime.ranks, what) for size in out_features], runtime, bias)


class ReplicatedLinear(ColumnParallelLinear):
    """Matrices of the same input in one product, which every rank computes whole: (T, D) -> (T, O)."""

    def __init__(self, in_features: int, out_features: Sequence[int], runtime: Runtime, *, bias: bool = False) -> None:
        """Allocate all rows of all matrices as one, uninitialised, on runtime.device."""
        self._allocate(in_features, [Part(size, 0, size) for size in out_features], runtime, bias)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections in one product, split by heads; kv heads are replicated if ranks exceed them.

    num_heads, num_kv_heads: as arguments of the whole model; as attributes of this rank, H and K. q_heads, kv_heads:
    which of the heads this rank has.
    Shapes: x_TD (T, D) -> qkv_TC (T, (H + 2K) * E) with this rank's H and K.
    Raises: ConfigError listing the valid tp values if the heads cannot be split.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        runtime: Runtime,
        *,
        bias: bool = False,
    ) -> None:
        """Allocate this rank's rows of q, then of k, then of v, uninitialised, on runtime.device."""
        q_heads, kv_heads = head_parts(num_heads, num_kv_heads, runtime.ranks)
        self.q_heads, self.kv_heads = q_heads, kv_heads
        self.num_heads, self.num_kv_heads = q_heads.size, kv_heads.size
        parts = [heads.times(head_dim) for heads in (q_heads, kv_heads, kv_heads)]
        self._allocate(in_features, parts, runtime, bias)


class RowParallelLinear:
    """x @ W.T + b with the input features split over the ranks; the partial sums are added up.

    in_features, out_features: of the whole layer. weight: this rank's columns. bias_O: whole, on every rank.
    Shapes: x_TD (T, D of this rank) -> (T, O), the same on every rank.
    Raises: ConfigError, naming `what`, if the ranks do not divide the input features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        runtime: Runtime,
        *,
        what: str = "input features",
        bias: bool = False,
    ) -> None:
        """Allocate this rank's columns, and the bias, uninitialised, on runtime.device."""
        self.ranks, self.kernels = runtime.ranks, runtime.kernels
        self.part = even_part(in_features, runtime.ranks, what)
        self.rows = Part(out_features, 0, out_features)
        self.weight = (runtime.weights or PLAIN).matrix(runtime, out_features, self.part.size)
        self.bias_O = empty_parameter(runtime, out_features) if bias else None
        self._own_bias = self.bias_O if self.ranks.rank == 0 else None

    @property
    def reads(self) -> Any:
        """The quantised matrix that alone multiplies what this layer is given; None if there is none."""
        return self.weight.prepared

    def local(self, x_TD: Tensor) -> Tensor:
        """Partial sum of this rank, (T, O); rank 0 alone adds the bias, so that the sum over ranks has it once."""
        return self.weight.linear(x_TD, self._own_bias)

    @property
    def weight_OD(self) -> Tensor:
        """The rank's columns in the model's dtype; see Weight.plain."""
        return self.weight.plain()

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The whole product: (T, D of this rank) -> (T, O)."""
        return self.ranks.all_reduce(self.local(x_TD))

    def add_rms_norm(
        self, x_TD: Tensor, residual_TO: Tensor, norm_weight_O: Tensor, eps: float, then: Any = None
    ) -> tuple[Any, Tensor]:
        """Kernels.add_rms_norm of the whole product and the residual, in fewer launches where kernels or ranks can.

        May overwrite the residual. then: see Weight.linear_add_rms_norm.
        """
        return self.weight.linear_add_rms_norm(x_TD, self._own_bias, residual_TO, norm_weight_O, eps, then)

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.weight` -> this rank's columns, and `name.bias` whole."""
        targets = self.weight.targets([MatrixPiece(name, 0, self.rows, self.part)])
        if self.bias_O is not None:
            targets[f"{name}.bias"] = WeightTarget.whole(self.bias_O, init="zeros")
        return targets


class GatedMLP:
    """down(silu(gate(x)) * up(x)) with the intermediate features split over the ranks; the partial sums are added up.

    hidden: D. inner: intermediate features of the whole block, over all ranks. bias: of all three products.
    activation: "gelu_tanh" takes the tanh form of GELU in place of silu; kernels may offer `gelu_tanh_mul` for it, and
    for plain weights `linear_gelu_tanh_mul`.
    Shapes: x_TD (T, D) -> (T, D), the same on every rank.
    Raises: ConfigError, naming `what`, if the ranks do not divide the intermediate features.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        runtime: Runtime,
        *,
        what: str = "intermediate_size",
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        """Allocate this rank's part of gate and up as one matrix, and of down, uninitialised, on runtime.device."""
        kernels = self.kernels = runtime.kernels
        self.gate_up = MergedColumnParallelLinear(hidden, [inner, inner], runtime, what=what, bias=bias)
        self.down = RowParallelLinear(inner, hidden, runtime, what=what, bias=bias)
        self._is_one_product = activation == "silu" and not bias
        self._is_silu = activation == "silu"
        self._has_gelu = not self._is_silu and is_offered(kernels.gelu_tanh_mul)
        is_plain = type(self.gate_up.weight) is PlainWeight  # no other class's product, which may be its own
        self._fuses_gelu = is_plain and not (self._is_silu or bias) and is_offered(kernels.linear_gelu_tanh_mul)

    def local(self, x_TD: Tensor) -> Tensor:
        """Partial sum of this rank, (T, D); the ranks' sums together are the block's output."""
        return self.down.local(self._gated(x_TD))

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The whole feed-forward: (T, D) -> (T, D)."""
        return self.down(self._gated(x_TD))

    @property
    def reads(self) -> Any:
        """The quantised matrix that alone multiplies what this block is given; None if there is none."""
        return self.gate_up.reads if self._is_one_product else None

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float, then: Any = None
    ) -> tuple[Any, Tensor]:
        """As RowParallelLinear.add_rms_norm, of the whole feed-forward: two (T, D), the norm and the sum."""
        return self.down.add_rms_norm(self._gated(x_TD), residual_TD, norm_weight_D, eps, then)

    def targets(self, name: str, gate: str, up: str, down: str) -> dict[str, WeightTarget]:
        """`name.gate.weight` and so on -> this rank's part."""
        return {**self.gate_up.targets(f"{name}.{gate}", f"{name}.{up}"), **self.down.targets(f"{name}.{down}")}

    def joined_targets(self, name: str, gate_up: str, down: str) -> dict[str, WeightTarget]:
        """`name.gate_up.weight`, which holds gate, then up, and `name.down.weight` -> this rank's part."""
        return {**self.gate_up.joined_targets(f"{name}.{gate_up}"), **self.down.targets(f"{name}.{down}")}

    def _gated(self, x_TD: Tensor) -> Any:
        if self._is_one_product:
            return self.gate_up.weight.linear_silu_mul(x_TD, self.down.weight.prepared)
        if self._fuses_gelu:
            return self.kernels.linear_gelu_tanh_mul(x_TD, self.gate_up.weight.plain())
        gate_up_TF = self.gate_up(x_TD)
        if self._is_silu:
            return self.kernels.silu_mul(gate_up_TF)
        return self.kernels.gelu_tanh_mul(gate_up_TF) if self._has_gelu else plain_gelu_tanh_mul(gate_up_TF)


def plain_gelu_tanh_mul(gate_up_TF: Tensor) -> Tensor:
    """See Kernels.gelu_tanh_mul."""
    gate_TF, up_TF = gate_up_TF.chunk(2, -1)
    return functional.gelu(gate_TF, approximate="tanh").mul_(up_TF)
