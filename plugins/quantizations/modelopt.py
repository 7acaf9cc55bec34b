"""NVIDIA modelopt's checkpoints: FP8, NVFP4 and others, of all linears or of each by its name (MIXED_PRECISION).

By config.json or by hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hookline.core.contracts import FP8, INT8, MatrixPiece, MatrixPlace, Quantization, Scheme, StoredForm
from hookline.core.errors import CheckpointError
from hookline.plugins.quantizations.fp4 import MXFP4, MXFP8, NVFP4, mxfp4_parts, mxfp8_parts, nvfp4_parts
from hookline.plugins.quantizations.fp8 import CACHE_SCALES, E4M3
from hookline.plugins.quantizations.loading import (
    ScaledLoading,
    StoredPart,
    blocks_read,
    is_stored,
    plain_read,
    scalar_read,
)
from hookline.plugins.quantizations.names import HEADS, aliases, is_named
from hookline.plugins.quantizations.values import Stated

MIXED = "MIXED_PRECISION"
"""The value of quant_algo if each entry of `quantized_layers` has its own algorithm."""
SMOOTHED = "pre_quant_scale"
"""A tensor by which the inputs of a linear are multiplied, as in AWQ and SmoothQuant."""
BLOCK = 128
"""Outputs and inputs of a block of FP8_PB_WO."""


class Modelopt(Quantization):
    """Reads quant_method modelopt."""

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        outer = Stated(form.stated or {})
        stated = outer.inner("quantization") or outer
        has_cache = any(stated.values.get(key) for key in ("kv_cache_quant_algo", "kv_cache_scheme"))
        has_cache_alone = stated.values.get("quant_algo") is None and has_cache
        self.algorithm = None if has_cache_alone else _algorithm(stated, MIXED)
        self.own: dict[str, str] = {}
        if self.algorithm == MIXED:
            layers = stated.inner("quantized_layers")
            if layers is None or not layers.values:
                stated.refuse("quantized_layers", "the algorithm of each linear")
            self.own = {name: _algorithm(layers.inner(name) or layers) for name in layers.values}
        self.left = [*stated.texts("exclude_modules", "ignore"), *outer.texts("ignore"), *HEADS]
        self.dtypes = form.dtypes

    def stores(self, name: str) -> str | None:
        """See Quantization."""
        if self.own:
            return self._own_of(name)
        is_left = not is_stored(self.dtypes, f"{name}.weight") and is_named(name, self.left)
        return None if is_left else self.algorithm

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> ScaledLoading:
        """See Quantization.

        Raises: CheckpointError for a linear whose activations would have to be multiplied first.
        """
        algorithm = self.stores(pieces[0].name)
        assert algorithm is not None, pieces
        for piece in pieces:
            if f"{piece.name}.{SMOOTHED}" in self.dtypes:
                raise CheckpointError(
                    f"the checkpoint has {piece.name}.{SMOOTHED}, by which activations are multiplied before they meet "
                    "the linear, and no layer here does so; use a checkpoint made without AWQ or SmoothQuant"
                )
        scheme, parts = ALGORITHMS[algorithm]
        return ScaledLoading(pieces, place, scheme, partial(self._parts, parts))

    def ignores(self, name: str) -> bool:
        """See Quantization."""
        return name.endswith(CACHE_SCALES)

    def _own_of(self, name: str) -> str | None:
        """The algorithm of a linear that `quantized_layers` names, or of the module it is in."""
        for alias in aliases(name):
            parts = alias.split(".")
            inside = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            found = next((self.own[one] for one in inside if one in self.own), None)
            if found is not None:
                return found
        return None

    def _parts(
        self, parts: Callable[[int, int], list[StoredPart]], name: str, num_rows: int, num_columns: int
    ) -> list[StoredPart]:
        found = parts(num_rows, num_columns)
        if f"{name}.input_scale" in self.dtypes:
            found.append(StoredPart("input_scale", "input_scale", (), scalar_read))
        return found


def _algorithm(stated: Stated, *further: str) -> str:
    """The name of an algorithm, in capital letters; FP8 and NVFP4 are written so, others in small ones as well."""
    value = stated.values.get("quant_algo")
    known = (*ALGORITHMS, *further)
    found = value.upper() if isinstance(value, str) else value
    if found not in known:
        stated.refuse("quant_algo", ", ".join(known))
    if "NVFP4" in str(found):
        stated.one_of("group_size", NVFP4.columns, default=NVFP4.columns)
    return str(found)


def _plain_parts(
    dtypes: tuple[str, ...], shape_of: Callable[[int, int], tuple[int, ...]], num_rows: int, num_columns: int
) -> list[StoredPart]:
    """`weight`, and `weight_scale` of this shape, given the outputs and inputs."""
    shape = shape_of(num_rows, num_columns)
    read = {0: scalar_read, 2: blocks_read, 4: _wide_blocks_read}[len(shape)]
    return [
        StoredPart("weight", "data", (num_rows, num_columns), plain_read, dtypes),
        StoredPart("weight_scale", "scales", shape, read),
    ]


def _wide_blocks(num_rows: int, num_columns: int) -> tuple[int, ...]:
    """The shape of scales of blocks as modelopt writes it: (blocks, 1, blocks, 1), and none of a single block."""
    rows, columns = -(-num_rows // BLOCK), -(-num_columns // BLOCK)
    return (rows, 1, columns, 1) if rows * columns > 1 else ()


def _wide_blocks_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read, for a tensor (blocks of outputs, 1, blocks of inputs, 1)."""
    found: Tensor = whole[rows]
    return found[:, 0, columns, 0]


def _int8_parts(num_rows: int, num_columns: int) -> list[StoredPart]:
    return _plain_parts(("I8",), lambda rows, _: (rows, 1), num_rows, num_columns)


def _nvfp4_parts(num_rows: int, num_columns: int) -> list[StoredPart]:
    return nvfp4_parts(num_rows, num_columns, "weight", "weight_scale_2")


ALGORITHMS: Mapping[str, tuple[Scheme, Callable[[int, int], list[StoredPart]]]] = {
    "FP8": (Scheme(FP8, 0, 0, activations="static"), partial(_plain_parts, E4M3, lambda *_: ())),
    "NVFP4": (replace(NVFP4, activations="static"), _nvfp4_parts),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        Scheme(FP8, 1, 0, activations="dynamic"),
        partial(_plain_parts, E4M3, lambda num_rows, _: (num_rows, 1)),
    ),
    "FP8_PB_WO": (Scheme(FP8, BLOCK, BLOCK), partial(_plain_parts, E4M3, _wide_blocks)),
    "W8A8_SQ_PER_CHANNEL": (Scheme(INT8, 1, 0, activations="static"), _int8_parts),
    "W8A16": (Scheme(INT8, 1, 0), _int8_parts),
    "W4A16_NVFP4": (NVFP4, _nvfp4_parts),
    "W4A8_NVFP4_FP8": (replace(NVFP4, activations="static"), _nvfp4_parts),
    "NVFP4_AWQ": (replace(NVFP4, activations="static"), _nvfp4_parts),
    "MXFP4": (MXFP4, lambda num_rows, num_columns: mxfp4_parts(num_rows, num_columns, "weight")),
    "W4A8_MXFP4_FP8": (MXFP4, lambda num_rows, num_columns: mxfp4_parts(num_rows, num_columns, "weight")),
    "MXFP8": (MXFP8, mxfp8_parts),
}
"""Name of an algorithm -> the scheme of its linears, and a function: outputs and inputs of a linear -> its tensors."""
