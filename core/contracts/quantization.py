"""The contract of quantizations, each of which reads one way in which checkpoints store matrices in few bits.

Legend: O outputs, D inputs, X experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.optional import optional
from hookline.core.contracts.quantized import QuantizedMatrix, Scheme
from hookline.core.contracts.weights import MatrixPiece, WeightTarget

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass
class QuantizationConfig:
    """Base of the config dataclass of every quantization's option."""

    dequantize: bool = False
    """Make plain matrices in the model's dtype of all quantised ones when they are loaded: they take as much memory as
    the unquantised model, and any kernels compute them."""


@dataclass(frozen=True)
class StoredForm:
    """The facts about a checkpoint that a quantization is constructed with.

    stated: the quantization_config in config.json or a file beside it; None for a checkpoint that is not quantised and
    is to be quantised while it is loaded. dtypes: safetensors' name of the dtype of each tensor, by the tensor's name;
    empty if weights are random.
    """

    stated: Mapping[str, Any] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MatrixPlace:
    """The matrix (O, D) of a rank, or one for each of X experts, that the pieces of several linears make up.

    num_rows: O. num_columns: D. num_experts: X; None for a single matrix. device: where its tensors are allocated.
    from_floats: the pieces' tensors are floats under `name.weight`, like random weights, and are quantised when they
    are written.
    """

    num_rows: int
    num_columns: int
    device: device
    num_experts: int | None = None
    from_floats: bool = False


class LoadingMatrix(Protocol):
    """A quantised matrix of a rank while it is loaded; its memory is allocated already."""

    scheme: Scheme
    """How its values are stored; the argument of QuantizedProducts.computes."""

    def targets(self) -> Mapping[str, WeightTarget]:
        """Full name of each of its tensors in the checkpoint -> where that goes."""
        ...

    def loaded(self) -> QuantizedMatrix:
        """The loaded matrix. Called once, when all targets are filled.

        Raises: CheckpointError, naming the tensor, for impossible values.
        """
        ...


class Quantization(Protocol):
    """A form of quantised checkpoints. Constructed as `Quantization(config, form)`.

    config: of the option's dataclass. Knows no model: it is asked about linears by their names in the checkpoint.
    """

    def __init__(self, config: Any, form: StoredForm) -> None:
        """Read `form.stated`.

        Raises: ConfigError, with the key and its value, for a setting that this class does not read; also if
                `form.stated` is None and the class only reads quantised checkpoints.
        """
        ...

    def stores(self, name: str) -> Hashable:
        """How the linear of this name is stored, as a value to compare; None: as a plain tensor in floats.

        Linears whose matrices are joined on a rank, e.g. queries, keys and values, must have equal answers; if they do
        not, they are dequantised when they are loaded. Core does not ask about a linear whose `name.weight` is stored
        in floats, unless the checkpoint is to be quantised.
        """
        ...

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> LoadingMatrix:
        """Allocate the matrix that these pieces make up. `stores` gave the same answer for all their linears.

        Rows of the place that no piece covers are padding; their values do not matter.
        """
        ...

    @optional
    def written(self, name: str, matrix: QuantizedMatrix) -> Mapping[str, Tensor]:
        """The tensors of one linear in a published checkpoint layout, for `hookline quantize`, by suffix of its name.

        A suffix is e.g. "weight_scale". matrix: the whole linear, quantised from floats by `matrix`. Quantizations that
        only read checkpoints leave this method out.
        """
        raise AssertionError("left out")

    @optional
    def states(self, left: Sequence[str]) -> Mapping[str, Any]:
        """The quantization_config of a checkpoint in that layout; goes with `written`.

        left: names of the linears and embeddings that are not quantised.
        """
        raise AssertionError("left out")

    @optional
    def calibrated(self, matrix: QuantizedMatrix, weight_OD: Tensor, moment_DD: Tensor) -> QuantizedMatrix:
        """The matrix with its values rounded anew for inputs that were seen: `hookline quantize rounding=calibrated`.

        matrix: a whole linear, quantised by `matrix` from the floats weight_OD. moment_DD: the sum of x.T @ x over the
        rows x that calibration texts gave this linear as input, float32. The result has a smaller error in products
        with such inputs than `matrix`; `written` accepts both.
        """
        raise AssertionError("left out")

    @optional
    def ignores(self, name: str) -> bool:
        """Whether a tensor of the checkpoint that has no target may be ignored; otherwise it is an error.

        An ignored bias must be zero, which core checks.
        """
        return False
