"""AutoRound's checkpoints (quant_method auto-round): linears in the layout of GPTQ or AWQ, with settings for some."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hookline.core.contracts import LoadingMatrix, MatrixPiece, MatrixPlace, Quantization, StoredForm
from hookline.plugins.quantizations.awq import Awq
from hookline.plugins.quantizations.gptq import Gptq
from hookline.plugins.quantizations.loading import ScaledQuantization, is_stored
from hookline.plugins.quantizations.names import HEADS, aliases, is_named
from hookline.plugins.quantizations.values import Stated, checked_pattern

GPTQ, AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
"""Values of packing_format: the tensors are those of GPTQ's first form without act-order, or of AWQ's GEMM layout."""
UNQUANTISED_BITS = (16, 32)
_BLOCKS = ("block_name_to_quantize", "to_quant_block_names")
_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")
"""What makes a name in extra_config a pattern."""


class AutoRound(Quantization):
    """Reads quant_method auto-round."""

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        self.stated = Stated(form.stated or {})
        self.packing = self.stated.one_of("packing_format", GPTQ, AWQ, default=GPTQ)
        self.stated.one_of("data_type", "int", default="int")
        self.stated.one_of("act_bits", *UNQUANTISED_BITS, default=16)
        self.config, self.dtypes = config, form.dtypes
        self.blocks = [name for key in _BLOCKS for name in _names(self.stated, key)]
        self.extra = self.stated.inner("extra_config") or Stated({})
        self.patterns = [key for key in self.extra.values if _PATTERN.search(key)]
        for key in self.patterns:
            checked_pattern(self.stated, "extra_config", key)
        self.forms: dict[tuple[Any, ...], ScaledQuantization] = {}
        self._form({})  # refuses settings that are not read

    def stores(self, name: str) -> Any:
        """See Quantization."""
        form = self._of(name)
        return None if form is None else form.stores(name)

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> LoadingMatrix:
        """See Quantization."""
        form = self._of(pieces[0].name)
        assert form is not None, pieces
        return form.matrix(pieces, place)

    def ignores(self, name: str) -> bool:
        """See Quantization."""
        return self._form({}).ignores(name)

    def _of(self, name: str) -> ScaledQuantization | None:
        """The form of a linear; None: it is not quantised. Where the settings and the tensors disagree, these count."""
        own = self._own(name)
        is_outside = bool(self.blocks) and not any(one.startswith(tuple(self.blocks)) for one in aliases(name))
        is_left = own.values.get("bits") in UNQUANTISED_BITS if own else is_outside or is_named(name, HEADS)
        if is_left and not is_stored(self.dtypes, f"{name}.qweight"):
            return None
        return self._form(own.values if own and not is_left else {})

    def _own(self, name: str) -> Stated | None:
        """The settings of a linear in extra_config: by its name, or by the first pattern that is found in it."""
        names = aliases(name)
        found = next((one for one in names if one in self.extra.values), None)
        if found is None:
            found = next((key for key in self.patterns if any(re.search(key, one) for one in names)), None)
        return None if found is None else self.extra.inner(found)

    def _form(self, own: Any) -> ScaledQuantization:
        """The reader of linears with these settings in place of the checkpoint's."""
        stated = {key: own.get(key, self.stated.values.get(key)) for key in ("bits", "group_size", "sym")}
        key = tuple(map(str, stated.values()))
        if key not in self.forms:
            # AWQ's layout has zero points of symmetric values, too.
            further = {"version": "gemm", "zero_point": True} if self.packing == AWQ else {"desc_act": False}
            self.forms[key] = (Awq if self.packing == AWQ else Gptq)(
                self.config, StoredForm({**stated, **further}, self.dtypes)
            )
        return self.forms[key]


def _names(stated: Stated, key: str) -> list[str]:
    """Names of blocks: a text with commas, a list of texts, or a list of such lists."""
    value = stated.values.get(key)
    if value is None:
        return []
    found = value.split(",") if isinstance(value, str) else value
    if isinstance(found, list | tuple):
        found = [name for one in found for name in (one if isinstance(one, list | tuple) else [one])]
        if all(isinstance(name, str) for name in found):
            return [name.strip() for name in found if name.strip()]
    stated.refuse(key, "names of blocks")
