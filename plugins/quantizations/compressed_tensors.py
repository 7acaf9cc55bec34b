"""compressed-tensors' checkpoints: floats of 8 and 4 bits, integers of 2 to 8, by groups of linears that it states.

A group states how the weights of its targets are stored (format, bits, strategy) and how activations were quantised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import FP8, INT4, INT8, MatrixPiece, MatrixPlace, Quantization, Scheme, StoredForm
from hookline.plugins.quantizations.fp4 import MXFP4, MXFP8, NVFP4, mxfp4_parts, mxfp8_parts, nvfp4_parts
from hookline.plugins.quantizations.fp8 import CACHE_SCALES, E4M3
from hookline.plugins.quantizations.loading import (
    ScaledLoading,
    StoredPart,
    blocks_read,
    inputs_read,
    is_stored,
    plain_read,
    scalar_read,
)
from hookline.plugins.quantizations.names import REGEX, aliases, is_named
from hookline.plugins.quantizations.packing import PackedRead, num_words, widened_codes
from hookline.plugins.quantizations.values import Stated, checked_pattern

LINEAR, EMBEDDING = "Linear", "Embedding"
"""Class names by which a group's targets name all linears and all embeddings."""
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings")
"""Names of the token embedding in transformers' models."""
FLOAT, INT, PACKED = "float-quantized", "int-quantized", "pack-quantized"
NVFP4_PACKED, MXFP4_PACKED, NAIVE = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "naive-quantized"
MXFP8_FORM = "mxfp8-quantized"
FORMATS = (FLOAT, INT, PACKED, NVFP4_PACKED, MXFP4_PACKED, MXFP8_FORM, NAIVE)
FIXED = {NVFP4_PACKED: NVFP4, MXFP4_PACKED: MXFP4, MXFP8_FORM: MXFP8}
"""The schemes of formats with a fixed scheme."""
ZEROS, ZERO_DTYPES = "weight_zero_point", ("I8", "F8_E4M3")
INPUT_SCALES = ("input_scale", "input_zero_point", "input_global_scale")
"""Tensors of static activations."""


@dataclass(frozen=True)
class Group:
    """Linears that are stored in the same way. bits: of a value. written: the format. has_gaps: see PackedRead."""

    targets: tuple[str, ...]
    scheme: Scheme
    bits: int
    written: str
    has_gaps: bool = False

    def has(self, name: str) -> bool:
        """Whether a linear or an embedding is one of its targets."""
        return self.kind(name) in self.targets or is_named(name, self.targets)

    @staticmethod
    def kind(name: str) -> str:
        """The class of a module, by its name."""
        return EMBEDDING if name.rpartition(".")[2] in EMBEDDINGS else LINEAR


class CompressedTensors(Quantization):
    """Reads quant_method compressed-tensors."""

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        stated = Stated(form.stated or {})
        groups = stated.inner("config_groups") or Stated({})
        if not groups.values and stated.inner("kv_cache_scheme") is None:
            stated.refuse("config_groups", "groups of linears with the format of their weights")
        sparsity = stated.inner("sparsity_config")
        if sparsity is not None and sparsity.values:
            sparsity.one_of("format", "dense", default="dense")
        transforms = stated.inner("transform_config")
        if transforms is not None and any(transforms.values.values()):
            stated.refuse("transform_config", "none")
        written = stated.values.get("format")
        has_gaps = _has_gaps(stated)
        inner = [groups.inner(key) or groups for key in groups.values]
        found = [(one, one.inner("weights")) for one in inner]  # without weights: what attention multiplies
        self.groups = [
            _group(one, weights, written, has_gaps=has_gaps) for one, weights in found if weights is not None
        ]
        self.by_target = {target: group for group in reversed(self.groups) for target in group.targets}
        self.ignored = stated.texts("ignore")
        for one in self.ignored:
            _check_pattern(stated, "ignore", one)
        self.dtypes = form.dtypes

    def stores(self, name: str) -> Group | None:
        """See Quantization."""
        data = (f"{name}.weight", f"{name}.weight_packed")
        if not any(is_stored(self.dtypes, one) for one in data) and is_named(name, self.ignored):
            return None
        # Whole names count before patterns, and patterns before classes.
        by_name = next((self.by_target[one] for one in aliases(name) if one in self.by_target), None)
        if by_name is not None:
            return by_name
        own = [group for group in self.groups if is_named(name, group.targets)]
        return next(iter(own), next((group for group in self.groups if group.has(name)), None))

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> ScaledLoading:
        """See Quantization."""
        group = self.stores(pieces[0].name)
        assert group is not None, pieces
        return ScaledLoading(pieces, place, group.scheme, partial(self._parts, group))

    def ignores(self, name: str) -> bool:
        """See Quantization."""
        return name.endswith(CACHE_SCALES)

    def _parts(self, group: Group, name: str, num_rows: int, num_columns: int) -> list[StoredPart]:
        parts = _PARTS[group.written](group, num_rows, num_columns)
        if f"{name}.weight_shape" in self.dtypes:
            parts.append(StoredPart("weight_shape", "shape", (2,), plain_read, ("I64", "I32")))
        if group.written in (FLOAT, INT) and not group.scheme.has_zeros and f"{name}.{ZEROS}" in self.dtypes:
            blocks = _scales_shape(group.scheme, num_rows, num_columns)
            parts.append(StoredPart(ZEROS, "zeros", blocks, _scales_read(group.scheme), ZERO_DTYPES))
        for suffix in INPUT_SCALES:
            if f"{name}.{suffix}" in self.dtypes:
                is_scale = suffix == "input_scale"
                dtypes = () if is_scale else ("I8", "F8_E4M3", "F32", "BF16", "F16")
                role = "input_scale" if is_scale else "unused"
                parts.append(StoredPart(suffix, role, (), scalar_read, dtypes))  # type: ignore[arg-type]
        return parts


def _group(stated: Stated, weights: Stated, written: Any, *, has_gaps: bool) -> Group:
    own = stated.values.get("format")
    form = own if own is not None else written
    if form not in FORMATS:
        (Stated({"format": form}) if own is None else stated).refuse("format", ", ".join(FORMATS))
    outputs = stated.inner("output_activations")
    if outputs is not None and outputs.values:
        stated.refuse("output_activations", "none")
    targets = stated.texts("targets")
    for one in targets:
        _check_pattern(stated, "targets", one)
    kind, bits = weights.one_of("type", "int", "float", default="int"), weights.one_of("num_bits", *range(2, 9))
    if form == NAIVE:
        form = FLOAT if kind == "float" else INT
    inputs = stated.inner("input_activations")
    activations = "" if inputs is None else "dynamic" if inputs.values.get("dynamic") else "static"
    if form in FIXED:
        weights.one_of("num_bits", 8 if form == MXFP8_FORM else 4)
        weights.one_of("group_size", FIXED[form].columns, default=FIXED[form].columns)
        return Group(tuple(targets), FIXED[form], bits, form)
    weights.one_of("type", "float" if form == FLOAT else "int", default="int")
    if form == FLOAT:
        weights.one_of("num_bits", 8)
    rows, columns = _block(weights)
    order = weights.one_of("actorder", "group", "weight", "static", "dynamic", True, False, default="weight")
    values = FP8 if form == FLOAT else INT4 if form == PACKED and bits <= 4 else INT8
    has_zeros = form != FLOAT and not weights.flag("symmetric", True)
    is_reordered = order in ("group", "dynamic", True) and columns > 0 and form == PACKED
    scheme = Scheme(values, rows, columns, has_zeros, is_reordered, activations)
    return Group(tuple(targets), scheme, bits, form, has_gaps)


def _has_gaps(stated: Stated) -> bool:
    """Whether values of 3, 5, 6 and 7 bits lie within words, as releases of compressed-tensors before 0.18 wrote them.

    A config.json without the release is one of the present form.
    """
    release = re.match(r"(\d{1,4})\.(\d{1,4})", str(stated.values.get("version")))
    return release is not None and (int(release[1]), int(release[2])) < (0, 18)


def _block(weights: Stated) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    size = weights.values.get("group_size")
    unstated = "tensor" if size is None else "channel" if size == -1 else "group"  # as compressed-tensors has it
    strategy = weights.one_of("strategy", "tensor", "channel", "group", "block", default=unstated)
    if strategy == "block":
        found = _split(weights).sizes("block_structure", 2)
        if found is None:
            weights.refuse("block_structure", "two whole numbers")
        return found[0], found[1]
    if strategy == "group":
        return 1, weights.size("group_size")
    return (0, 0) if strategy == "tensor" else (1, 0)


def _split(weights: Stated) -> Stated:
    """The values, with a block_structure of the form "128x128", as older versions wrote it, split into two numbers."""
    block = weights.values.get("block_structure")
    if isinstance(block, str) and re.fullmatch(r"\d{1,7}x\d{1,7}", block):
        return Stated({**weights.values, "block_structure": [int(one) for one in block.split("x")]}, weights.name)
    return weights


def _check_pattern(stated: Stated, key: str, module: str) -> None:
    if module.startswith(REGEX):
        checked_pattern(stated, key, module.removeprefix(REGEX))


def _num_blocks(scheme: Scheme, num_rows: int, num_columns: int) -> tuple[int, int]:
    return -(-num_rows // (scheme.rows or num_rows)), -(-num_columns // (scheme.columns or num_columns))


def _scales_shape(scheme: Scheme, num_rows: int, num_columns: int) -> tuple[int, ...]:
    return _num_blocks(scheme, num_rows, num_columns) if scheme.rows else ()


def _float_parts(group: Group, num_rows: int, num_columns: int) -> list[StoredPart]:
    scales = _scales_shape(group.scheme, num_rows, num_columns)
    return [
        StoredPart("weight", "data", (num_rows, num_columns), plain_read, E4M3),
        StoredPart("weight_scale", "scales", scales, _scales_read(group.scheme)),
    ]


def _int_parts(group: Group, num_rows: int, num_columns: int) -> list[StoredPart]:
    scales, read = _scales_shape(group.scheme, num_rows, num_columns), _scales_read(group.scheme)
    parts = [
        StoredPart("weight", "data", (num_rows, num_columns), plain_read, ("I8",)),
        StoredPart("weight_scale", "scales", scales, read),
    ]
    if group.scheme.has_zeros:
        parts.append(StoredPart(ZEROS, "zeros", scales, read, ("I8",)))
    return parts


def _packed_parts(group: Group, num_rows: int, num_columns: int) -> list[StoredPart]:
    rows, columns = _num_blocks(group.scheme, num_rows, num_columns)
    data = PackedRead(group.bits, "columns", then=widened_codes(group.bits), has_gaps=group.has_gaps)
    words = partial(num_words, bits=group.bits, has_gaps=group.has_gaps)
    parts = [
        StoredPart("weight_packed", "data", (num_rows, words(num_columns)), data, ("I32",)),
        StoredPart("weight_scale", "scales", (rows, columns), _scales_read(group.scheme)),
    ]
    if group.scheme.has_zeros:
        zeros = replace(data, along="rows")
        parts.append(StoredPart(ZEROS, "zeros", (words(rows), columns), zeros, ("I32",)))
    if group.scheme.is_reordered:
        read = partial(_groups_read, group.scheme.columns)
        parts.append(StoredPart("weight_g_idx", "groups", (num_columns,), read, ("I32", "I64")))
    return parts


def _groups_read(size: int, whole: Any, rows: slice, columns: slice) -> Tensor:
    """See Read. Groups of `size` neighbours if -1 is among the stored ones, as compressed-tensors has it."""
    stored: Tensor = whole[...]
    found = torch.arange(len(stored)) // size if bool((stored == -1).any()) else stored
    return inputs_read(found, rows, columns)


def _scales_read(scheme: Scheme) -> Any:
    return blocks_read if scheme.rows else scalar_read


_PARTS: dict[str, Callable[[Group, int, int], list[StoredPart]]] = {
    FLOAT: _float_parts,
    INT: _int_parts,
    PACKED: _packed_parts,
    NVFP4_PACKED: lambda _, num_rows, num_columns: nvfp4_parts(
        num_rows, num_columns, "weight_packed", "weight_global_scale", divides=True
    ),
    MXFP4_PACKED: lambda _, num_rows, num_columns: mxfp4_parts(num_rows, num_columns, "weight_packed"),
    MXFP8_FORM: lambda _, num_rows, num_columns: mxfp8_parts(num_rows, num_columns),
}
