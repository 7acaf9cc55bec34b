"""Weights of layers in few bits, as a quantization stores them, multiplied by kernels that compute its schemes.

A weight learns which linears of the checkpoint it is made of when they are named; what a quantization does not store
in few bits is then a plain weight. Knows no format: a `Quantization` makes and fills the matrices.
Legend: as in core/layers/weights.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from hookline.core.checkpoint.safetensors_files import FLOAT_DTYPES
from hookline.core.contracts import (
    OFFSETS,
    Activation,
    ExpertWeights,
    LoadingMatrix,
    MatrixPiece,
    MatrixPlace,
    Quantization,
    QuantizedMatrix,
    Runtime,
    Weight,
    WeightTarget,
    is_offered,
)
from hookline.core.errors import ConfigError
from hookline.core.layers.expert_products import Expert, expert_mlp, sum_experts
from hookline.core.layers.linear import plain_gelu_tanh_mul
from hookline.core.layers.renamed import RenamedQuantization
from hookline.core.layers.weights import PLAIN, PlainExperts, PlainWeight, SummedExperts

_log = logging.getLogger("hookline")


class QuantizedWeight:
    """A matrix (O, D) that kernels multiply as it is. Implements hookline.core.contracts.Weight."""

    def __init__(self, runtime: Runtime, matrix: QuantizedMatrix) -> None:
        """Let the kernels prepare the matrix."""
        self.kernels, self.ranks = runtime.kernels, runtime.ranks
        self.prepared = runtime.kernels.prepare_weight(matrix)

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Weight."""
        return self.kernels.quantized_linear(x_TD, self.prepared, bias_O)

    def linear_silu_mul(self, x_TD: Tensor, then: Any = None) -> Any:
        """See Weight."""
        return self.kernels.quantized_linear_silu_mul(x_TD, self.prepared, *_if_any(then))

    def linear_add_rms_norm(
        self, x_TD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor, eps: float,
        then: Any = None,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        """See Weight."""
        if self.ranks.size == 1:
            given = x_TD, self.prepared, bias_O, residual_TO, norm_weight_O, eps
            return self.kernels.quantized_linear_add_rms_norm(*given, *_if_any(then))
        partial_TO = self.kernels.quantized_linear(x_TD, self.prepared, bias_O)
        return self.ranks.add_rms_norm(self.kernels, partial_TO, residual_TO, norm_weight_O, eps)


def _if_any(then: Any) -> tuple[Any, ...]:
    """The argument, which kernels are given only where there is one."""
    return () if then is None else (then,)


class DequantisingWeight(PlainWeight):
    """A matrix (O, D) that is made plain for each product: what a CPU computes."""

    def __init__(self, runtime: Runtime, matrix: QuantizedMatrix) -> None:
        """Keep the matrix."""
        self.kernels, self.ranks = runtime.kernels, runtime.ranks
        self.matrix, self.dtype = matrix, runtime.dtype

    @property
    def matrix_OD(self) -> Tensor:  # type: ignore[override]
        """The plain matrix, made anew."""
        return self.matrix.dequantised(self.dtype)


class OwnProductWeight(PlainWeight):
    """A matrix (O, D) that multiplies by itself; see Scheme.multiplies."""

    def __init__(self, runtime: Runtime, matrix: QuantizedMatrix) -> None:
        """Keep the matrix."""
        self.kernels, self.ranks, self.matrix = runtime.kernels, runtime.ranks, matrix

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Weight."""
        product_TO = self.matrix.linear(x_TD)
        return product_TO if bias_O is None else product_TO.add_(bias_O)

    def linear_silu_mul(self, x_TD: Tensor, then: Any = None) -> Tensor:
        """See Weight."""
        return self.kernels.silu_mul(self.matrix.linear(x_TD))

    def linear_add_rms_norm(
        self, x_TD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor, eps: float,
        then: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Weight."""
        partial_TO = self.linear(x_TD, bias_O)
        return self.ranks.add_rms_norm(self.kernels, partial_TO, residual_TO, norm_weight_O, eps)


class QuantizedExperts(SummedExperts):
    """Matrices (X, 2F, D) and (X, D, F) that kernels multiply as they are. Implements ExpertWeights."""

    def __init__(self, runtime: Runtime, gate_up: QuantizedMatrix, down: QuantizedMatrix) -> None:
        """Let the kernels prepare the matrices."""
        self.kernels, self.ranks = runtime.kernels, runtime.ranks
        self.gate_up, self.down = (runtime.kernels.prepare_weight(one) for one in (gate_up, down))

    def mlp(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """See ExpertWeights."""
        return self.kernels.quantized_expert_mlp(x_TD, expert_TA, weight_TA, self.gate_up, self.down)

    def mlp_add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ExpertWeights."""
        if self.ranks.size == 1:
            given = x_TD, expert_TA, weight_TA, self.gate_up, self.down
            return self.kernels.quantized_expert_mlp_add_rms_norm(*given, residual_TD, norm_weight_D, eps)
        return super().mlp_add_rms_norm(x_TD, expert_TA, weight_TA, residual_TD, norm_weight_D, eps)


class DequantisingExperts(SummedExperts):
    """The same without kernels: each expert multiplies by itself, or is made plain for its products, as on a CPU."""

    def __init__(
        self, runtime: Runtime, gate_up: QuantizedMatrix, down: QuantizedMatrix, activation: Activation = "silu"
    ) -> None:
        """Keep the matrices."""
        self.activation = activation
        self.kernels, self.ranks, self.dtype = runtime.kernels, runtime.ranks, runtime.dtype
        self.experts: list[Expert] = [
            partial(self._expert, gate_up.of_expert(index), down.of_expert(index)) for index in range(_num(gate_up))
        ]

    def mlp(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """See ExpertWeights."""
        return sum_experts(self.experts, x_TD, expert_TA, weight_TA)

    def _expert(self, gate_up: QuantizedMatrix, down: QuantizedMatrix, x_ND: Tensor) -> Tensor:
        if gate_up.scheme.multiplies:
            gated = self.kernels.silu_mul if self.activation == "silu" else plain_gelu_tanh_mul
            return down.linear(gated(gate_up.linear(x_ND)))
        return expert_mlp(x_ND, gate_up.dequantised(self.dtype), down.dequantised(self.dtype), self.activation)


class UnnamedWeight:
    """A weight that is plain or quantised as soon as its linears are named. Implements Weight.

    make_plain: allocates it as a plain one.
    """

    linear: Callable[..., Tensor]
    """See Weight."""
    linear_silu_mul: Callable[..., Any]
    """See Weight."""
    linear_add_rms_norm: Callable[..., tuple[Any, Tensor]]
    """See Weight."""
    prepared: Any = None
    """See Weight."""

    def __init__(
        self, factory: QuantizedWeights, runtime: Runtime, shape: tuple[int, int], make_plain: Callable[[], PlainWeight]
    ) -> None:
        """Allocate nothing yet."""
        self._factory, self._runtime, self._shape, self._make_plain = factory, runtime, shape, make_plain
        self._plain: PlainWeight | None = None

    def targets(self, pieces: Sequence[MatrixPiece]) -> dict[str, WeightTarget]:
        """See Weight.

        Raises: ConfigError if no kernels compute what the checkpoint stores.
        """
        if self._plain is not None or not self._factory.quantises(pieces):
            self.plain()
            assert self._plain is not None
            return self._plain.targets(pieces)
        loading, is_computed = self._factory.begin(self._runtime, self._shape, pieces)
        if not is_computed and self._factory.falls_back(loading):
            self.plain()
            return self.targets(pieces)
        by_itself = OwnProductWeight if loading.scheme.multiplies else DequantisingWeight

        def finish() -> None:
            self._be((QuantizedWeight if is_computed else by_itself)(self._runtime, loading.loaded()))

        self._factory.unfinished.append(finish)
        return dict(loading.targets())

    def plain(self) -> Tensor:
        """See Weight."""
        if self._plain is None:
            self._plain = self._make_plain()
            self._be(self._plain)
        return self._plain.plain()

    def _be(self, weight: QuantizedWeight | PlainWeight) -> None:
        """Multiply by this weight from now on, without another call in between."""
        self.linear, self.linear_silu_mul = weight.linear, weight.linear_silu_mul
        self.linear_add_rms_norm, self.prepared = weight.linear_add_rms_norm, weight.prepared


class UnnamedExperts:
    """The same for experts, of which either all are plain or all are quantised. Implements ExpertWeights."""

    mlp: Callable[..., Tensor]
    """See ExpertWeights."""
    mlp_add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    """See ExpertWeights."""

    def __init__(
        self, factory: QuantizedWeights, runtime: Runtime, sizes: tuple[int, int, int], activation: Activation
    ) -> None:
        """Allocate nothing yet. sizes: number of experts, D, F."""
        self._factory, self._runtime, self._sizes, self._activation = factory, runtime, sizes, activation

    def targets(self, gate_up: Sequence[MatrixPiece], down: Sequence[MatrixPiece]) -> dict[str, WeightTarget]:
        """See ExpertWeights."""
        if not self._factory.quantises(gate_up) or not self._factory.quantises(down):
            return self._plain(gate_up, down)
        num_experts, hidden, inner = self._sizes
        begun = [
            self._factory.begin(self._runtime, shape, pieces, num_experts, self._activation)
            for shape, pieces in (((2 * inner, hidden), gate_up), ((hidden, inner), down))
        ]
        is_computed = all(is_computed for _, is_computed in begun)
        if not is_computed and any(self._factory.falls_back(loading) for loading, _ in begun):
            return self._plain(gate_up, down)

        def finish() -> None:
            first, second = (loading.loaded() for loading, _ in begun)
            if is_computed:
                self._be(QuantizedExperts(self._runtime, first, second))
            else:
                self._be(DequantisingExperts(self._runtime, first, second, self._activation))

        self._factory.unfinished.append(finish)
        return {name: target for loading, _ in begun for name, target in loading.targets().items()}

    def _plain(self, gate_up: Sequence[MatrixPiece], down: Sequence[MatrixPiece]) -> dict[str, WeightTarget]:
        plain: PlainExperts = PLAIN.experts(self._runtime, *self._sizes, self._activation)
        self._be(plain)
        return plain.targets(gate_up, down)

    def _be(self, experts: PlainExperts | QuantizedExperts | DequantisingExperts) -> None:
        self.mlp, self.mlp_add_rms_norm = experts.mlp, experts.mlp_add_rms_norm


class QuantizedWeights:
    """Makes the weights of one rank's model as a quantization stores them. Implements WeightFactory.

    dtypes: safetensors' names of what the checkpoint stores, by tensor; empty for random weights. from_floats: all
    tensors are floats, and are quantised when they are written. dequantises: all weights become plain.
    kernels: what the configuration calls the kernels, for errors. unfinished: what `finish` has to call.
    """

    def __init__(
        self,
        quantization: Quantization,
        dtypes: Mapping[str, str],
        *,
        from_floats: bool,
        dequantises: bool,
        kernels: str,
    ) -> None:
        """Make none yet."""
        self.quantization, self.dtypes = quantization, dtypes
        self.from_floats, self.dequantises, self.kernels = from_floats, dequantises, kernels
        self.unfinished: list[Callable[[], None]] = []
        self._num_plain, self._unlike = 0, list[str]()

    def matrix(self, runtime: Runtime, num_rows: int, num_columns: int) -> Weight:
        """See WeightFactory."""
        shape = num_rows, num_columns
        return UnnamedWeight(self, runtime, shape, lambda: PLAIN.matrix(runtime, *shape))

    def head(self, runtime: Runtime, num_rows: int, num_columns: int) -> Weight:
        """See WeightFactory."""
        shape = num_rows, num_columns
        return UnnamedWeight(self, runtime, shape, lambda: PLAIN.head(runtime, *shape))

    def experts(
        self, runtime: Runtime, num_experts: int, hidden: int, inner: int, activation: Activation = "silu"
    ) -> ExpertWeights:
        """See WeightFactory."""
        return UnnamedExperts(self, runtime, (num_experts, hidden, inner), activation)

    def rename(self, tensor_name: Callable[[str], str | None]) -> None:
        """See WeightFactory."""
        renamed = RenamedQuantization(self.quantization, self.dtypes, tensor_name)
        self.quantization, self.dtypes = renamed, renamed.dtypes

    def finish(self) -> None:
        """Convert the loaded tensors into weights, one after the other. Call it once, after loading."""
        if self._num_plain:
            told = "kernels=%s do not compute how %d matrices are stored, which were dequantised as they were loaded"
            _log.info(told, self.kernels, self._num_plain)
        if self._unlike:
            told = "%d matrices join linears that are stored in unlike forms, and were made plain, the first that of %s"
            _log.info(told, len(self._unlike), self._unlike[0])
        while self.unfinished:
            self.unfinished.pop(0)()

    def quantises(self, pieces: Sequence[MatrixPiece]) -> bool:
        """Whether the matrix of these pieces is kept in few bits."""
        if self.dequantises:
            return False
        forms = {self.form(piece.name) for piece in pieces}
        if len(forms) > 1:
            self._unlike.append(pieces[0].name)
        return len(forms) == 1 and None not in forms

    def form(self, name: str) -> Any:
        """How the linear of this name is stored; None: as a plain tensor, and kept so."""
        is_float = self.dtypes.get(f"{name}.weight") in FLOAT_DTYPES
        return None if is_float and not self.from_floats else self.quantization.stores(name)

    def falls_back(self, loading: LoadingMatrix) -> bool:
        """Whether a matrix that the kernels do not compute becomes plain; see Scheme.else_plain. Counts it."""
        self._num_plain += loading.scheme.else_plain
        return loading.scheme.else_plain

    def begin(
        self,
        runtime: Runtime,
        shape: tuple[int, int],
        pieces: Sequence[MatrixPiece],
        num_experts: int | None = None,
        activation: Activation = "silu",
    ) -> tuple[LoadingMatrix, bool]:
        """Allocate the matrix of these pieces, and whether the kernels compute it.

        A CPU needs none that do, and neither does a matrix that multiplies by itself, or that may become plain.

        Raises: ConfigError if nothing computes it.
        """
        place = MatrixPlace(*shape, runtime.device, num_experts, self.from_floats)
        loading = self.quantization.matrix(pieces, place)
        kernels = runtime.kernels
        is_gated = activation == "silu" and loading.scheme.values not in OFFSETS
        is_offer = num_experts is None or (is_gated and is_offered(kernels.quantized_expert_mlp))
        is_computed = is_offer and kernels.computes(loading.scheme, *shape)
        is_needed = not is_computed and not loading.scheme.multiplies and runtime.device.type == "cuda"
        if is_needed and not loading.scheme.else_plain:
            gate = "" if activation == "silu" else f"quantised experts with a gate of {activation}, which is "
            raise ConfigError(
                f"kernels={self.kernels} do not compute {gate}what {pieces[0].name} is stored as: {loading.scheme}, "
                f"{shape[0]} outputs and {shape[1]} inputs on a rank; set quantization.dequantize=true, which takes "
                "the memory of the unquantised model"
            )
        return loading, is_computed


def _num(matrix: QuantizedMatrix) -> int:
    """How many experts a matrix has one for."""
    return matrix.num_experts or 1
