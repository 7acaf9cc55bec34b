"""FP8 (e4m3) weights: checkpoints with quant_method fp8, in blocks or with one scale, and fbgemm_fp8, by outputs.

Stored are `X.weight` and `X.weight_scale_inv` or `X.weight_scale`, by which the weight is multiplied whatever the name
says, but for checkpoints of GPTQModel; with static activations `X.input_scale` or `X.activation_scale` as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hookline.core.contracts import FP8, MatrixPiece, MatrixPlace, Part, Scheme, StoredForm
from hookline.plugins.quantizations.loading import (
    FLOATS,
    Read,
    ScaledLoading,
    ScaledQuantization,
    StoredPart,
    blocks_read,
    inverse_of,
    plain_read,
    scalar_read,
)
from hookline.plugins.quantizations.names import HEADS
from hookline.plugins.quantizations.values import Stated

E4M3 = ("F8_E4M3",)
"""safetensors' name of the dtype."""
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
SCALE_DTYPES = (*FLOATS, "F8_E8M0")
KINDS = ("gate_proj", "up_proj")
"""An expert's matrices in `experts.gate_up_proj`, one below the other."""
INPUT_SCALES = ("input_scale", "activation_scale")
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", "_proj.output_scale")
"""Ends of names of scales of a quantised KV cache, which core reads if engine.kv_dtype asks for one."""


class Fp8(ScaledQuantization):
    """Reads quant_method fp8."""

    surplus = CACHE_SCALES

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        stated = Stated(form.stated or {})
        stated.one_of("fmt", "e4m3", "e4m3fn", "float8_e4m3fn", default="e4m3")
        activations = stated.one_of("activation_scheme", "dynamic", "static", default="dynamic")
        block = stated.sizes("weight_block_size", 2)
        method = stated.one_of("weight_scale_method", "tensor", "row", "block", default="block" if block else "tensor")
        rows, columns = block or (int(method == "row"), 0)
        semantics = "weight_scale_semantics"  # of GPTQModel, whose values are divided by their scales
        self.divides = semantics in stated.values and stated.one_of(semantics, "inverse") == "inverse"
        self.scheme = Scheme(FP8, rows, columns, activations=activations)
        self.left = [*stated.texts("modules_to_not_convert", "ignored_layers"), *HEADS]
        self.dtypes = form.dtypes

    def parts(self, name: str, num_rows: int, num_columns: int) -> list[StoredPart]:
        """See ScaledQuantization."""
        rows, columns = self.scheme.rows, self.scheme.columns
        shape = (-(-num_rows // rows), -(-num_columns // (columns or num_columns))) if rows else ()
        read: Read = blocks_read if rows else scalar_read
        read = inverse_of(read) if self.divides else read
        parts = [
            StoredPart("weight", "data", (num_rows, num_columns), plain_read, E4M3),
            StoredPart(self._suffix(name, WEIGHT_SCALES), "scales", shape, read, SCALE_DTYPES),
        ]
        if self.scheme.activations == "static":
            parts.append(StoredPart(self._suffix(name, INPUT_SCALES), "input_scale", (), scalar_read))
        return parts

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> ScaledLoading:
        """See Quantization."""
        return super().matrix([self._stacked(piece) for piece in pieces], place)

    def _stacked(self, piece: MatrixPiece) -> MatrixPiece:
        """The same rows of an expert's gate and the matrix below it as one, if blocks cut through both."""
        expert, _, kind = piece.name.rpartition(".")
        whole, total = f"{expert}.gate_up_proj", piece.rows.total
        if kind not in KINDS or f"{whole}.weight" not in self.dtypes or not total % (self.scheme.rows or 1):
            return piece
        first = total * KINDS.index(kind)
        return replace(piece, name=whole, rows=Part(2 * total, first + piece.rows.start, first + piece.rows.stop))

    def _suffix(self, name: str, suffixes: Sequence[str]) -> str:
        """The suffix under which the tensor is stored; if none is, the suffix of other linears, or the first one."""
        named = [one for one in suffixes if f"{name}.{one}" in self.dtypes]
        others = [one for one in suffixes if not named and any(other.endswith(f".{one}") for other in self.dtypes)]
        return [*named, *others, suffixes[0]][0]


class FbgemmFp8(ScaledQuantization):
    """Reads quant_method fbgemm_fp8, as in Llama 3.1 405B: a scale for each output, and one for each token."""

    surplus = (*CACHE_SCALES, ".input_scale_ub")
    scheme = Scheme(FP8, 1, 0, activations="dynamic")

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        self.left = [*Stated(form.stated or {}).texts("modules_to_not_convert"), *HEADS]
        self.dtypes = form.dtypes

    def parts(self, name: str, num_rows: int, num_columns: int) -> list[StoredPart]:
        """See ScaledQuantization."""
        return [
            StoredPart("weight", "data", (num_rows, num_columns), plain_read, E4M3),
            StoredPart("weight_scale", "scales", (num_rows, 1), blocks_read),
        ]
