"""Quantised checkpoints for tests: each layout written by code of its own, beside the same model dequantised.

A layout maps the name and the values of a linear to the tensors that a checkpoint stores of it, and to the values that
these stand for. Written by the formats' descriptions, with none of the plugins' code. Legend: O outputs, D inputs,
G groups of inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
"""What a checkpoint stores of one linear, by what follows the linear's name."""
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Layout:
    """config: the quantization_config. write: values (O, D) -> what is stored, and the values that it stands for.

    left: last parts of names of linears that stay as they are.
    """

    config: Mapping[str, Any]
    write: Callable[[Tensor], tuple[Stored, Tensor]]
    left: tuple[str, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors of the checkpoint."""


def write_layout(plain: Path, folder: Path, layout: Layout) -> tuple[Path, Path]:
    """The folders of a quantised checkpoint made of a plain one, and of the same dequantised."""
    folder.mkdir(parents=True, exist_ok=True)
    quantised, dequantised = folder / "quantised", folder / "dequantised"
    stored: Stored = {}
    for file in sorted(plain.glob("*.safetensors")):
        stored |= load_file(file)
    packed: Stored = dict(layout.tensors)
    values: Stored = {}
    for name, tensor in stored.items():
        linear = name.removesuffix(".weight")
        is_left = any(linear.endswith(one) for one in (*layout.left, "lm_head", "embed_tokens", "mlp.gate"))
        if tensor.ndim != 2 or linear == name or is_left:
            packed[name] = values[name] = tensor
            continue
        parts, values[name] = layout.write(tensor.float())
        packed |= {f"{linear}.{suffix}": part for suffix, part in parts.items()}
    config = json.loads((plain / "config.json").read_text())
    for place, tensors, further in (
        (quantised, packed, {"quantization_config": dict(layout.config)}),
        (dequantised, values, {}),
    ):
        shutil.copytree(plain, place, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: one.contiguous().clone() for name, one in tensors.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({**config, **further}))
    return quantised, dequantised


def fp8_blocks(rows: int, columns: int) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """X.weight in e4m3 and X.weight_scale_inv for each block of these sizes."""

    def write(values: Tensor) -> tuple[Stored, Tensor]:
        stored, meant = torch.zeros(values.shape, dtype=E4M3), torch.zeros(values.shape)
        num_rows, num_columns = values.shape
        scales = torch.zeros(-(-num_rows // rows), -(-num_columns // columns))
        for row in range(len(scales)):
            for column in range(scales.shape[1]):
                block = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
                scales[row, column] = values[block].abs().max() / 448
                stored[block] = (values[block] / scales[row, column]).to(E4M3)
                meant[block] = stored[block].float() * scales[row, column]
        return {"weight": stored, "weight_scale_inv": scales}, meant

    return write


def fp8_tensor(suffix: str, *, inputs: str = "", shape: tuple[int, ...] = ()) -> Callable[..., tuple[Stored, Tensor]]:
    """X.weight in e4m3 and one scale; inputs: the suffix of the scale of static activations."""

    def write(values: Tensor) -> tuple[Stored, Tensor]:
        scale = (values.abs().max() / 448).to(torch.bfloat16).float()
        stored = (values / scale).to(E4M3)
        given = {inputs: torch.tensor(0.25).reshape(shape)} if inputs else {}
        meant = stored.float() * scale
        return {"weight": stored, suffix: scale.reshape(shape).to(torch.bfloat16), **given}, meant

    return write


FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
LAYOUTS: dict[str, Layout] = {
    "fp8_blocks": Layout({**FP8, "weight_block_size": [128, 128]}, fp8_blocks(128, 128)),
    "fp8_small_blocks": Layout(
        {**FP8, "weight_block_size": [16, 24], "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]},
        fp8_blocks(16, 24),
        left=("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"),
    ),
    "fp8_mixed_qkv": Layout(
        {**FP8, "weight_block_size": [16, 16], "modules_to_not_convert": ["v_proj"]},
        fp8_blocks(16, 16),
        left=("v_proj",),
    ),
    "fp8_tensor": Layout(FP8, fp8_tensor("weight_scale")),
    "fp8_static": Layout(
        {**FP8, "activation_scheme": "static", "weight_block_size": None},
        fp8_tensor("weight_scale_inv", inputs="activation_scale", shape=(1,)),
        tensors={"model.layers.0.self_attn.k_scale": torch.tensor(1.0)},
    ),
}
