"""How a checkpoint stores its matrices in few bits: what a quantization is given and what it implements.

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
    """What is known of a checkpoint before a quantization is made.

    stated: its quantization_config, of config.json or a file beside it; None for a checkpoint that is not quantised
    and shall be while it is loaded. dtypes: safetensors' name of the dtype of each tensor, by the tensor's name; empty
    if weights are random.
    """

    stated: Mapping[str, Any] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MatrixPlace:
    """The matrix (O, D) of a rank, or one for each of X experts, that pieces are for.

    num_rows: O. num_columns: D. num_experts: X; None for a matrix alone. device: where its tensors are allocated.
    from_floats: the pieces' tensors are floats under `name.weight`, as random weights are, and are quantised when they
    are written.
    """

    num_rows: int
    num_columns: int
    device: device
    num_experts: int | None = None
    from_floats: bool = False


class LoadingMatrix(Protocol):
    """A quantised matrix of a rank, whose memory is allocated, while it is loaded."""

    scheme: Scheme
    """How its values are stored, by which kernels are asked whether they compute it."""

    def targets(self) -> Mapping[str, WeightTarget]:
        """Where the checkpoint's tensors go, by their whole names."""
        ...

    def loaded(self) -> QuantizedMatrix:
        """The matrix. Called once, when all targets are filled.

        Raises: CheckpointError, naming the tensor, for values that cannot be right.
        """
        ...


class Quantization(Protocol):
    """A form of quantised checkpoints. Constructed as `Quantization(config, form)`.

    config: of the option's dataclass. Knows no model: it is asked about linears by their names in the checkpoint.
    """

    def __init__(self, config: Any, form: StoredForm) -> None:
        """Read what the checkpoint states.

        Raises: ConfigError, with the key and its value, for what this class does not read; also if `form.stated` is
        None and it quantises nothing by itself.
        """
        ...

    def stores(self, name: str) -> Hashable:
        """How the linear of this name is stored; None: as a plain tensor in floats.

        Linears whose matrices are joined on a rank, as those of queries, keys and values, must have equal answers; if
        they do not, they are made plain when they are loaded. Core does not ask where `name.weight` is stored in
        floats, unless the checkpoint is to be quantised.
        """
        ...

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> LoadingMatrix:
        """Allocate the matrix that these pieces make up, of linears that `stores` has one answer for.

        Rows of the place that no piece has are padding; what is in them does not matter.
        """
        ...

    @optional
    def written(self, name: str, matrix: QuantizedMatrix) -> Mapping[str, Tensor]:
        """What a checkpoint in a published layout stores of a linear, by what follows its name: `hookline quantize`.

        matrix: the whole linear, as `matrix` made it of floats. Quantizations that read checkpoints leave it out.
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

        matrix: a whole linear, as `matrix` made it of the floats weight_OD. moment_DD: the sum of x.T @ x over rows of
        inputs that calibration texts gave this linear, float32. Products with such inputs change less by the result's
        rounding than by the matrix's; both are `written` alike.
        """
        raise AssertionError("left out")

    @optional
    def ignores(self, name: str) -> bool:
        """Whether a stored tensor that nothing asked for is not needed, rather than an error.

        A bias that is ignored must be zero, which core checks.
        """
        return False
