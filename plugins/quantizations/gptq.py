"""GPTQ checkpoints (quant_method gptq): groups of inputs in two to eight bits, packed along the inputs.

Stored are, of b bits, `X.qweight` (inputs * b / 32, outputs), `X.qzeros` (groups, outputs * b / 32), `X.scales`
(groups, outputs) and `X.g_idx` (inputs,), the group of each input: with act-order (desc_act) neighbours are in any
groups. In the first form of these checkpoints a zero point is stored less one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hookline.core.contracts import INT4, INT8, MatrixPiece, MatrixPlace, Scheme, StoredForm
from hookline.plugins.quantizations.loading import (
    ScaledLoading,
    ScaledQuantization,
    StoredPart,
    inputs_read,
    is_stored,
    transposed_read,
)
from hookline.plugins.quantizations.names import HEADS, aliases
from hookline.plugins.quantizations.packing import PackedRead, num_words, widened_codes
from hookline.plugins.quantizations.values import Stated, checked_pattern, group_size

SKIPPED, OWN = "-:", "+:"
"""GPTQModel's prefixes of patterns in `dynamic`: of unquantised modules, and of modules with another number of bits."""
WORDS, GROUPS = ("I32",), ("I32", "I64")
"""safetensors' names of the dtypes of words, and of g_idx."""


class Gptq(ScaledQuantization):
    """Reads quant_method gptq."""

    data = "qweight"

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        stated = Stated(form.stated or {})
        self.bits = stated.one_of("bits", 2, 3, 4, 8)
        known = [key for key in ("checkpoint_format", "format") if stated.values.get(key) is not None]
        written = [stated.one_of(key, "gptq", "gptq_v2") for key in known][:1] or ["gptq"]
        self.adds_one = written == ["gptq"]
        stated.one_of("is_marlin_format", False, default=False)
        stated.one_of("pack_dtype", "int32", default="int32")
        group, is_reordered = group_size(stated, "group_size"), stated.flag("desc_act")
        self.scheme = Scheme(
            INT8 if self.bits == 8 else INT4,
            1,
            group,
            has_zeros=not stated.flag("sym", True),
            is_reordered=is_reordered and group > 0,
        )
        dynamic = stated.inner("dynamic") or Stated({})
        self.own: list[tuple[str, Gptq | None]] = []  # by patterns of names, of which the first that fits counts
        for key in dynamic.values:
            pattern = checked_pattern(stated, "dynamic", key.removeprefix(SKIPPED).removeprefix(OWN))
            own = None if key.startswith(SKIPPED) else dynamic.inner(key)
            form_of_own = {**stated.values, **(own.values if own else {}), "dynamic": None}
            self.own.append((pattern, Gptq(config, replace(form, stated=form_of_own)) if own else None))
        heads = () if stated.flag("lm_head") else HEADS
        self.left = [*stated.texts("modules_to_not_convert"), *heads]
        self.dtypes = form.dtypes

    def _of(self, name: str) -> Gptq | None:
        """The form of a linear; None: it is not quantised."""
        names = aliases(name)
        return next((own for pattern, own in self.own if any(re.match(pattern, one) for one in names)), self)

    def stores(self, name: str) -> tuple[Scheme, int] | None:  # type: ignore[override]
        """See Quantization."""
        own = self._of(name)
        if own is None and not is_stored(self.dtypes, f"{name}.{self.data}"):
            return None
        form = own or self
        return None if super().stores(name) is None else (form.scheme, form.bits)

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> ScaledLoading:
        """See Quantization."""
        own = self._of(pieces[0].name) or self
        return ScaledLoading(pieces, place, own.scheme, own.parts)

    def ignores(self, name: str) -> bool:
        """See Quantization: AutoGPTQ writes biases of zero for linears that have none."""
        return name.endswith(".bias") and f"{name.removesuffix('bias')}{self.data}" in self.dtypes

    def parts(self, name: str, num_rows: int, num_columns: int) -> list[StoredPart]:
        """See ScaledQuantization."""
        num_groups = -(-num_columns // (self.scheme.columns or num_columns))
        data = PackedRead(self.bits, "columns", transposed=True, then=widened_codes(self.bits))
        zeros = PackedRead(self.bits, "rows", transposed=True, then=self._zero_points)
        parts = [
            StoredPart("qweight", "data", (num_words(num_columns, self.bits), num_rows), data, WORDS),
            StoredPart("qzeros", "zeros", (num_groups, num_words(num_rows, self.bits)), zeros, WORDS),
            StoredPart("scales", "scales", (num_groups, num_rows), transposed_read),
        ]
        if self.scheme.is_reordered or f"{name}.g_idx" in self.dtypes:
            parts.append(StoredPart("g_idx", "groups", (num_columns,), inputs_read, GROUPS))
        return parts

    def _zero_points(self, values: Tensor) -> Tensor:
        found: Tensor = values + int(self.adds_one) & 2**self.bits - 1  # a stored -1, all bits set, means 0
        widen = widened_codes(self.bits)
        return found if widen is None else widen(found)
