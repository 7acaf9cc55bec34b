"""GPTQ checkpoints (quant_method gptq): groups of inputs in four or eight bits, packed along the inputs.

Stored are `X.qweight` (inputs / 8, outputs), `X.qzeros` (groups, outputs / 8), `X.scales` (groups, outputs) and
`X.g_idx` (inputs,), the group of each input: with act-order (desc_act) neighbours are in any groups. In the first form
of these checkpoints a zero point is stored less one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import INT4, INT8, Scheme, StoredForm
from hookline.plugins.quantizations.loading import ScaledQuantization, StoredPart, inputs_read, transposed_read
from hookline.plugins.quantizations.names import HEADS, REGEX
from hookline.plugins.quantizations.packing import PackedRead, signed_bytes
from hookline.plugins.quantizations.values import Stated, checked_pattern, group_size

SKIPPED = "-:"
"""How GPTQModel marks patterns of modules, among those with bits of their own, that are not quantised."""
WORDS, GROUPS = ("I32",), ("I32", "I64")
"""safetensors' names of the dtypes of words, and of g_idx."""


class Gptq(ScaledQuantization):
    """Reads quant_method gptq."""

    data = "qweight"

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        stated = Stated(form.stated or {})
        self.bits = stated.one_of("bits", 4, 8)
        written = stated.one_of("checkpoint_format", "gptq", "gptq_v2", default="gptq")
        self.adds_one = written == "gptq"
        stated.one_of("is_marlin_format", False, default=False)
        group, is_reordered = group_size(stated, "group_size"), stated.flag("desc_act")
        self.scheme = Scheme(
            INT4 if self.bits == 4 else INT8,
            1,
            group,
            has_zeros=not stated.flag("sym", True),
            is_reordered=is_reordered and group > 0,
        )
        dynamic = stated.inner("dynamic")
        skipped = [] if dynamic is None else list(dynamic.values)
        if dynamic is not None and (other := [key for key in skipped if not key.startswith(SKIPPED)]):
            dynamic.refuse(other[0], f"patterns of modules that are not quantised, behind '{SKIPPED}'")
        heads = () if stated.flag("lm_head") else HEADS
        patterns = [REGEX + checked_pattern(stated, "dynamic", key.removeprefix(SKIPPED)) for key in skipped]
        self.left = [*stated.texts("modules_to_not_convert"), *heads, *patterns]
        self.dtypes = form.dtypes

    def ignores(self, name: str) -> bool:
        """See Quantization: AutoGPTQ writes biases of zero for linears that have none."""
        return name.endswith(".bias") and f"{name.removesuffix('bias')}{self.data}" in self.dtypes

    def parts(self, name: str, num_rows: int, num_columns: int) -> list[StoredPart]:
        """See ScaledQuantization."""
        num_groups, per_word = -(-num_columns // (self.scheme.columns or num_columns)), 32 // self.bits
        as_bytes = None if self.bits == 4 else signed_bytes
        data = PackedRead(self.bits, "columns", transposed=True, then=as_bytes)
        zeros = PackedRead(self.bits, "rows", transposed=True, then=self._zero_points)
        parts = [
            StoredPart("qweight", "data", (-(-num_columns // per_word), num_rows), data, WORDS),
            StoredPart("qzeros", "zeros", (num_groups, -(-num_rows // per_word)), zeros, WORDS),
            StoredPart("scales", "scales", (num_groups, num_rows), transposed_read),
        ]
        if self.scheme.is_reordered or f"{name}.g_idx" in self.dtypes:
            parts.append(StoredPart("g_idx", "groups", (num_columns,), inputs_read, GROUPS))
        return parts

    def _zero_points(self, values: Tensor) -> Tensor:
        found: Tensor = values + int(self.adds_one) & 2**self.bits - 1  # a stored -1, all bits set, means 0
        return found.to(torch.float32) if self.bits == 4 else found.float() - 128
