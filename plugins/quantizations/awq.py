"""AWQ checkpoints (quant_method awq): groups of inputs in four bits with zero points, packed along the outputs.

Stored are `X.qweight` (inputs, outputs / 8), `X.qzeros` (groups, outputs / 8) and `X.scales` (groups, outputs).
"""

from __future__ import annotations

from typing import Any

from hookline.core.contracts import INT4, Scheme, StoredForm
from hookline.plugins.quantizations.loading import ScaledQuantization, StoredPart, transposed_read
from hookline.plugins.quantizations.names import HEADS
from hookline.plugins.quantizations.packing import AWQ_ORDER, PackedRead
from hookline.plugins.quantizations.values import Stated, group_size

INT32 = ("I32",)
"""safetensors' name of the dtype of words."""


class Awq(ScaledQuantization):
    """Reads quant_method awq in its GEMM layout, which checkpoints on the hub have."""

    data = "qweight"

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        stated = Stated(form.stated or {})
        stated.one_of("bits" if "bits" in stated.values else "w_bit", 4)
        for key in ("version", "checkpoint_format", "format"):  # of AutoAWQ, and twice of GPTQModel
            stated.one_of(key, "gemm", "GEMM", default="gemm")
        stated.one_of("pack_dtype", "int32", default="int32")
        stated.flag("zero_point")  # AutoRound says false where all are 8, and stores them, too
        group = group_size(stated, "group_size" if "group_size" in stated.values else "q_group_size")
        self.scheme = Scheme(INT4, 1, group, has_zeros=True)
        self.left = [*stated.texts("modules_to_not_convert"), *HEADS]
        self.dtypes = form.dtypes

    def parts(self, name: str, num_rows: int, num_columns: int) -> list[StoredPart]:
        """See ScaledQuantization."""
        num_groups = -(-num_columns // (self.scheme.columns or num_columns))
        read, words = PackedRead(4, "rows", transposed=True, order=AWQ_ORDER), -(-num_rows // 8)
        return [
            StoredPart("qweight", "data", (num_columns, words), read, INT32),
            StoredPart("qzeros", "zeros", (num_groups, words), read, INT32),
            StoredPart("scales", "scales", (num_groups, num_rows), transposed_read),
        ]
