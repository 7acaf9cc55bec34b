"""Writes a ScaledMatrix in compressed-tensors' layout, which compressed_tensors.py and other engines read.

Legend: O outputs, D inputs, R and C the blocks of a scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import FP8, INT4, INT8, ScaledMatrix, Scheme
from hookline.core.errors import ConfigError
from hookline.plugins.quantizations.compressed_tensors import FLOAT, LINEAR, PACKED, ZEROS
from hookline.plugins.quantizations.packing import PackedRead

BITS = {FP8: 8, INT8: 8, INT4: 4}


def tensors_of(matrix: ScaledMatrix) -> dict[str, Tensor]:
    """The stored tensors of a linear, by suffix of its name.

    Raises: ConfigError if the groups do not divide its inputs, which other engines refuse.
    """
    scheme = matrix.scheme
    if scheme.columns and scheme.values != FP8 and matrix.num_columns % scheme.columns:
        raise ConfigError(
            f"quantization.group_size={scheme.columns} does not divide the {matrix.num_columns} inputs of a linear, "
            "and other engines read no such groups; choose one that does, for example 32"
        )
    if scheme.values == FP8:
        return {"weight": matrix.data, "weight_scale": matrix.scales_RC}
    bits = BITS[scheme.values]
    stored = {
        "weight_packed": PackedRead(bits, "columns").packed(_codes(matrix)),
        "weight_scale": matrix.scales_RC,
        "weight_shape": torch.tensor([matrix.num_rows, matrix.num_columns]),
    }
    if matrix.zeros_RC is not None:
        stored[ZEROS] = PackedRead(bits, "rows").packed(matrix.zeros_RC.to(torch.uint8))
    return stored


def config_of(scheme: Scheme, left: Iterable[str]) -> Mapping[str, Any]:
    """The quantization_config of linears of one scheme. left: names of linears that are not quantised."""
    is_float = scheme.values == FP8
    strategy = "channel" if not scheme.columns else "block" if scheme.rows > 1 else "group"
    weights = {
        "num_bits": BITS[scheme.values],
        "type": "float" if is_float else "int",
        "symmetric": not scheme.has_zeros,
        "strategy": strategy,
        "dynamic": False,
        "group_size": scheme.columns if strategy == "group" else None,
        "block_structure": [scheme.rows, scheme.columns] if strategy == "block" else None,
    }
    by_group = {"strategy": "group", "group_size": scheme.columns} if strategy == "block" else {"strategy": "token"}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, **by_group}
    written = FLOAT if is_float else PACKED
    group = {
        "targets": [LINEAR],
        "format": written,
        "weights": weights,
        "input_activations": inputs if scheme.activations else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(left),
        "kv_cache_scheme": None,
    }


def _codes(matrix: ScaledMatrix) -> Tensor:
    """Unsigned values (O, D): int8 with 128 added, int4 as they are."""
    if matrix.scheme.values == INT8:
        return matrix.data.int() + 128
    halves = matrix.data.unsqueeze(-1) >> matrix.data.new_tensor([0, 4])
    return (halves & 15).flatten(-2)[:, : matrix.num_columns]
