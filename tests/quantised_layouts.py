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
    others: Mapping[str, Callable[[Tensor], tuple[Stored, Tensor]]] = field(default_factory=dict)
    """What writes linears in place of `write`, by a part of their names."""
    with_head: bool = False
    """Whether the head is quantised, if the model has one of its own."""


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
        heads = () if layout.with_head else ("lm_head",)
        own = any(part in linear for part in layout.others)
        is_left = any(linear.endswith(one) for one in (*layout.left, *heads, "embed_tokens", "mlp.gate")) and not own
        if tensor.ndim != 2 or linear == name or is_left:
            packed[name] = values[name] = tensor
            continue
        write = next((write for part, write in layout.others.items() if part in linear), layout.write)
        parts, values[name] = write(tensor.float())
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


def write_stacked_fp8(plain: Path, folder: Path, block: tuple[int, int]) -> tuple[Path, Path]:
    """As write_layout, of experts in FP8 alone, which lie in one tensor for each matrix, gate above up."""
    write = fp8_blocks(*block)
    paths = folder / "quantised", folder / "dequantised"
    values: Stored = {}
    for file in sorted(plain.glob("*.safetensors")):
        values |= load_file(file)
    packed = {name: tensor for name, tensor in values.items() if ".experts." not in name}
    for stem in {name.partition(".experts.")[0] + ".experts" for name in values if ".experts." in name}:
        count = sum(name.startswith(f"{stem}.") for name in values) // 3
        for kinds, whole in ((("gate_proj", "up_proj"), "gate_up_proj"), (("down_proj",), "down_proj")):
            each = []
            for expert in range(count):
                names = [f"{stem}.{expert}.{kind}.weight" for kind in kinds]
                stored, meant = write(torch.cat([values[name] for name in names]))
                values |= dict(zip(names, (one.clone() for one in meant.chunk(len(names))), strict=True))
                each.append(stored)
            packed[f"{stem}.{whole}"] = torch.stack([one["weight"].view(torch.uint8) for one in each]).view(E4M3)
            packed[f"{stem}.{whole}_scale_inv"] = torch.stack([one["weight_scale_inv"] for one in each])
    config = json.loads((plain / "config.json").read_text())
    stated = {"quantization_config": {**FP8, "weight_block_size": list(block)}}
    for path, tensors, more in zip(paths, (packed, values), (stated, {}), strict=True):
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**config, **more}))
    return paths


def fp8_tensor(suffix: str, *, inputs: str = "", shape: tuple[int, ...] = ()) -> Callable[..., tuple[Stored, Tensor]]:
    """X.weight in e4m3 and one scale; inputs: the suffix of the scale of static activations."""

    def write(values: Tensor) -> tuple[Stored, Tensor]:
        scale = (values.abs().max() / 448).to(torch.bfloat16).float()
        stored = (values / scale).to(E4M3)
        given = {inputs: torch.tensor(0.25).reshape(shape)} if inputs else {}
        meant = stored.float() * scale
        return {"weight": stored, suffix: scale.reshape(shape).to(torch.bfloat16), **given}, meant

    return write


def grouped(
    values: Tensor, size: int, bits: int, *, has_zeros: bool, order: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Values rounded to unsigned codes in groups of inputs: codes (O, D), scales and zeros (O, G), and what they mean.

    order: the group of each input; else neighbours have the same.
    """
    num_rows, num_columns = values.shape
    group_of = torch.arange(num_columns) // size if order is None else order
    most, num_groups = 2**bits - 1, -(-num_columns // size)
    scales, zeros = torch.zeros(num_rows, num_groups), torch.full((num_rows, num_groups), 2 ** (bits - 1))
    for group in range(num_groups):
        own = values[:, group_of == group]
        if has_zeros:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[:, group] = ((high - low) / most).half().float()
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, most).long()
        else:
            scales[:, group] = (own.abs().amax(1) / (2 ** (bits - 1) - 1)).half().float()
    codes = ((values / scales[:, group_of]).round() + zeros[:, group_of]).clamp(0, most).long()
    return codes, scales, zeros, (codes - zeros[:, group_of]) * scales[:, group_of]


def words(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned codes put together in int32 along a dimension; order: which neighbour has the lowest bits, and so on."""
    moved = codes.movedim(dim, -1)
    if order is not None:
        moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % len(order)))
        moved = moved.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)
    each_bit = (moved.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2)
    each_bit = torch.nn.functional.pad(each_bit, (0, -each_bit.shape[-1] % 32)).unflatten(-1, (-1, 32))
    word = (each_bit.long() << torch.arange(32)).sum(-1)
    return (word - (word >= 2**31) * 2**32).to(torch.int32).movedim(-1, dim)


def unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first codes of those that `words` put together along the first dimension, of bits that divide 32."""
    each = (packed.unsqueeze(1) >> torch.arange(0, 32, bits, dtype=torch.int32).view(1, -1, 1)) & 2**bits - 1
    return each.flatten(0, 1)[:count]


def awq(size: int) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """X.qweight (D, O / 8), X.qzeros (G, O / 8), X.scales (G, O)."""

    def write(values: Tensor) -> tuple[Stored, Tensor]:
        codes, scales, zeros, meant = grouped(values, size, 4, has_zeros=True)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": words(codes.T, 4, 1, order),
            "qzeros": words(zeros.T, 4, 1, order),
            "scales": scales.T.half(),
        }, meant

    return write


def group_order(num_columns: int, size: int, *, act_order: bool) -> Tensor:
    """The group of each input (D,): neighbours share one, unless act_order has put the inputs in another order."""
    order = torch.arange(num_columns) // size
    if not act_order:
        return order
    return order[torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))]


def gptq(
    size: int,
    *,
    bits: int = 4,
    has_zeros: bool = False,
    act_order: bool = False,
    less: int = 1,
    writes_groups: bool = True,
) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """X.qweight (D / 8, O), X.qzeros (G, O / 8) less one, X.scales (G, O), X.g_idx (D,)."""

    def write(values: Tensor) -> tuple[Stored, Tensor]:
        order = group_order(values.shape[1], size, act_order=act_order)
        codes, scales, zeros, meant = grouped(values, size, bits, has_zeros=has_zeros, order=order)
        stored = {
            "qweight": words(codes.T, bits, 0),
            "qzeros": words(zeros.T - less & 2**bits - 1, bits, 1),
            "scales": scales.T.half(),
        }
        return {**stored, **({"g_idx": order.int()} if writes_groups else {})}, meant

    return write


def words_with_gaps(codes: Tensor, bits: int, dim: int) -> Tensor:
    """As words, of values that lie within one word each, whose last bits are unused."""
    moved = codes.movedim(dim, -1)
    each = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % (32 // bits))).unflatten(-1, (-1, 32 // bits))
    padded = torch.nn.functional.pad((each.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2), (0, 32 % bits))
    return words(padded.flatten(-2), 1, -1).movedim(-1, dim)


def packed(
    size: int, *, bits: int = 4, has_zeros: bool = False, act_order: bool = False, put: Callable[..., Tensor] = words
) -> Callable[..., Any]:
    """compressed-tensors' X.weight_packed (O, D / 8), X.weight_scale (O, G), X.weight_zero_point (O / 8, G).

    put: what puts codes together in words.
    """

    def write(values: Tensor) -> tuple[Stored, Tensor]:
        order = group_order(values.shape[1], size, act_order=act_order)
        codes, scales, zeros, meant = grouped(values, size, bits, has_zeros=has_zeros, order=order)
        stored = {
            "weight_packed": put(codes, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(values.shape),
        }
        if has_zeros:
            stored["weight_zero_point"] = put(zeros, bits, 0)
        return {**stored, **({"weight_g_idx": order.int()} if act_order else {})}, meant

    return write


def mxfp8(values: Tensor) -> tuple[Stored, Tensor]:
    """X.weight in e4m3, and a power of two for 32 inputs as its exponent + 127."""
    groups = torch.nn.functional.pad(values, (0, -values.shape[1] % 32)).unflatten(1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-9).log2().floor() - 8
    unit = exponents.exp2().repeat_interleave(32, 1)[:, : values.shape[1]]
    stored = (values / unit).clamp(-448, 448).to(E4M3)
    return {"weight": stored, "weight_scale": (exponents + 127).to(torch.uint8)}, stored.float() * unit


def wide_blocks(values: Tensor) -> tuple[Stored, Tensor]:
    """modelopt's X.weight_scale of blocks of 128: (blocks, 1, blocks, 1), or () of a single block."""
    stored, meant = fp8_blocks(128, 128)(values)
    scales = stored["weight_scale_inv"]
    return {"weight": stored["weight"], "weight_scale": scales[:, None, :, None].squeeze() if scales.numel() == 1 else
            scales[:, None, :, None]}, meant  # fmt: skip


def int8_of_4_bits(values: Tensor) -> tuple[Stored, Tensor]:
    """compressed-tensors' X.weight in int8 of values of 4 bits, in groups of 16, where activations are in few bits."""
    codes, scales, _, meant = grouped(values, 16, 4, has_zeros=False)
    return {"weight": (codes - 8).to(torch.int8), "weight_scale": scales}, meant


def below_zero(write: Callable[[Tensor], tuple[Stored, Tensor]]) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """The same with scales of both signs, as AutoRound's symmetric ones."""

    def turned(values: Tensor) -> tuple[Stored, Tensor]:
        sign = (torch.arange(len(values)) % 2 * 2 - 1).unsqueeze(1)
        stored, meant = write(values * sign)
        return {**stored, "scales": stored["scales"] * sign.T}, meant * sign

    return turned


def turned_groups(write: Callable[[Tensor], tuple[Stored, Tensor]]) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """GPTQ's, with the inputs of another order: as that of the inputs turned round."""

    def turned(values: Tensor) -> tuple[Stored, Tensor]:
        stored, meant = write(values.flip(1))
        order = stored["g_idx"].flip(0)
        codes = unpacked(stored["qweight"], 4, values.shape[1]).flip(0)
        return {**stored, "qweight": words(codes, 4, 0), "g_idx": order}, meant.flip(1)

    return turned


def inverse_scales(write: Callable[[Tensor], tuple[Stored, Tensor]]) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """With the inverse of each scale stored in its place."""

    def inverted(values: Tensor) -> tuple[Stored, Tensor]:
        stored, meant = write(values)
        return {name: 1 / one.float() if name == "weight_scale" else one for name, one in stored.items()}, meant

    return inverted


def renamed_scales(write: Callable[[Tensor], tuple[Stored, Tensor]]) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """The same with compressed-tensors' name of the scales."""

    def renamed(values: Tensor) -> tuple[Stored, Tensor]:
        stored, meant = write(values)
        return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"]}, meant

    return renamed


def int8(*, has_zeros: bool = False, writes_zeros: bool = False) -> Callable[..., Any]:
    """compressed-tensors' X.weight in int8, X.weight_scale (O, 1), X.weight_zero_point (O, 1).

    writes_zeros: also where they are all zero, as old versions did.
    """

    def write(values: Tensor) -> tuple[Stored, Tensor]:
        codes, scales, zeros, meant = grouped(values, values.shape[1], 8, has_zeros=has_zeros)
        stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if has_zeros or writes_zeros:
            stored["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return stored, meant

    return write


def fp8_channel(values: Tensor) -> tuple[Stored, Tensor]:
    """X.weight in e4m3 and X.weight_scale (O, 1)."""
    scales = values.abs().amax(1, keepdim=True) / 448
    stored = (values / scales).to(E4M3)
    return {"weight": stored, "weight_scale": scales}, stored.float() * scales


def fp4(names: tuple[str, str], *, divides: bool) -> Callable[..., Any]:
    """NVFP4: e2m1 two to a byte, e4m3 scales of 16 inputs, and one scale of all, which multiplies or divides."""
    values_of = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def write(values: Tensor) -> tuple[Stored, Tensor]:
        num_columns = values.shape[1]
        groups = torch.nn.functional.pad(values, (0, -num_columns % 16)).unflatten(1, (-1, 16))
        whole = values.abs().max() / (6 * 448)
        scales = (groups.abs().amax(-1) / 6 / whole).to(E4M3)
        unit = (scales.float() * whole).unsqueeze(-1)
        codes = ((groups / unit).abs().unsqueeze(-1) - values_of).abs().argmin(-1)
        meant = (values_of[codes] * groups.sign() * unit).flatten(1)[:, :num_columns]
        signed = (codes + 8 * (groups < 0)).flatten(1)[:, : -(-num_columns // 2) * 2]
        stored = (signed[:, ::2] + 16 * signed[:, 1::2]).to(torch.uint8)
        factor = (1 / whole if divides else whole).reshape(1)
        meant = (
            meant
            if not divides
            else (values_of[codes] * groups.sign()).flatten(1)[:, :num_columns]
            * ((scales.float() / factor).repeat_interleave(16, 1)[:, :num_columns])
        )
        return {names[0]: stored, "weight_scale": scales, names[1]: factor}, meant

    return write


def mxfp4(values: Tensor) -> tuple[Stored, Tensor]:
    """e2m1 two to a byte, and a power of two for 32 inputs as its exponent + 127."""
    values_of = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    num_columns = values.shape[1]
    groups = torch.nn.functional.pad(values, (0, -num_columns % 32)).unflatten(1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
    unit = exponents.exp2().unsqueeze(-1)
    codes = ((groups / unit).abs().unsqueeze(-1) - values_of).abs().argmin(-1)
    meant = (values_of[codes] * groups.sign() * unit).flatten(1)[:, :num_columns]
    signed = (codes + 8 * (groups < 0)).flatten(1)[:, : -(-num_columns // 2) * 2]
    stored = (signed[:, ::2] + 16 * signed[:, 1::2]).to(torch.uint8)
    return {"weight_packed": stored, "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **further: Any
) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp[.]gate$"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        **further,
    }


FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 8, "data_type": "int", "act_bits": 16}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 8}
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
        tensors={f"model.layers.0.self_attn.{name}": torch.tensor(1.0) for name in ("k_scale", "kv_scale")},
    ),
    "fp8_channel": Layout(
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        ),
        fp8_channel,
    ),
    "compressed_fp8_static": Layout(
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
        fp8_tensor("weight_scale", inputs="input_scale", shape=(1,)),
    ),
    "int8": Layout(
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}), int8()
    ),
    "int8_zeros": Layout(
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
        int8(has_zeros=True),
    ),
    "packed": Layout(
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}),
        packed(16),
    ),
    "packed_zeros": Layout(
        compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": False},
        ),
        packed(8, has_zeros=True),
    ),
    "packed_8_bits": Layout(
        compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}),
        packed(16, bits=8),
    ),
    "compressed_mixed": Layout(
        {
            **compressed("mixed-precision", {}),
            "config_groups": {
                "group_0": {
                    "targets": ["re:.*self_attn[.](q|k|v|o)_proj$"],
                    "format": "float-quantized",
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                },
                "group_1": {
                    "targets": ["Linear"],
                    "format": "pack-quantized",
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
                },
            },
            "ignore": ["lm_head", "re:model[.]layers[.]0[.]mlp[.](gate|up)_proj"],
        },
        packed(16),
        left=("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
        others={"self_attn": fp8_channel},
    ),
    "int8_tensor_old": Layout(
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
        int8(writes_zeros=True),
    ),
    "compressed_blocks_old": Layout(
        compressed(
            "naive-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "16x24"},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 24, "dynamic": True},
        ),
        renamed_scales(fp8_blocks(16, 24)),
    ),
    "packed_order": Layout(
        compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "actorder": "group"},
        ),
        packed(16, act_order=True),
    ),
    "compressed_nvfp4": Layout(
        compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        fp4(("weight_packed", "weight_global_scale"), divides=True),
    ),
    "compressed_mxfp4": Layout(
        compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
        mxfp4,
    ),
    "modelopt_fp8": Layout(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*mlp.gate"]},
        fp8_tensor("weight_scale", inputs="input_scale"),
        tensors={"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)},
    ),
    "modelopt_nvfp4": Layout(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        fp4(("weight", "weight_scale_2"), divides=False),
    ),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}, awq(8)),
    "gptq": Layout(
        {**GPTQ, "desc_act": False, "sym": True},
        gptq(8),
        tensors={"model.layers.0.mlp.up_proj.bias": torch.zeros(56)},  # AutoGPTQ's, of a linear that has none
    ),
    "gptq_dynamic": Layout(
        {**GPTQ, "desc_act": False, "sym": True, "dynamic": {"-:.*layers[.]0[.]mlp[.](gate|up)_proj": {}}},
        gptq(8),
        left=("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    ),
    "gptq_zeros": Layout({**GPTQ, "desc_act": False, "sym": False}, gptq(8, has_zeros=True, writes_groups=False)),
    "gptq_order": Layout({**GPTQ, "desc_act": True, "sym": True}, gptq(8, act_order=True)),
    "gptq_v2_order_zeros": Layout(
        {**GPTQ, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(8, has_zeros=True, act_order=True, less=0),
    ),
    "gptq_8_bits": Layout({**GPTQ, "bits": 8, "desc_act": False, "sym": True}, gptq(8, bits=8)),
}
FURTHER: dict[str, Layout] = {
    "packed_3_bits_zeros": Layout(
        compressed(
            "pack-quantized",
            {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 8, "symmetric": False},
        ),
        packed(8, bits=3, has_zeros=True),
    ),
    "gptq_unlike_orders": Layout(
        {**GPTQ, "desc_act": True, "sym": False},
        gptq(8, act_order=True, has_zeros=True),
        others={part: turned_groups(gptq(8, act_order=True, has_zeros=True)) for part in ("k_proj", "up_proj")},
    ),
    "fp8_rows_of_gptqmodel": Layout(
        {**FP8, "weight_scale_method": "row", "weight_scale_semantics": "inverse"}, inverse_scales(fp8_channel)
    ),
    "compressed_fp8_scalar": Layout(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        fp8_tensor("weight_scale"),
    ),
    "packed_3_bits_old": Layout(
        compressed(
            "pack-quantized",
            {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 8, "symmetric": False},
            version="0.12.2",
        ),
        packed(8, bits=3, has_zeros=True, put=words_with_gaps),
    ),
    "packed_5_bits_old": Layout(
        compressed("pack-quantized", {"num_bits": 5, "type": "int", "strategy": "channel"}, version="0.9.1.a20250301"),
        packed(2**20, bits=5, put=words_with_gaps),
    ),
    "compressed_by_name": Layout(
        {
            **compressed("mixed-precision", {}),
            "config_groups": {
                "group_0": {
                    "targets": ["re:.*layers.*"],
                    "format": "pack-quantized",
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
                },
                "group_1": {
                    "targets": ["model.layers.0.mlp.down_proj"],
                    "format": "float-quantized",
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                },
            },
        },
        packed(16),
        others={"layers.0.mlp.down_proj": fp8_channel},
    ),
    "packed_7_bits": Layout(
        compressed("pack-quantized", {"num_bits": 7, "type": "int", "strategy": "channel"}), packed(2**20, bits=7)
    ),
    "int8_of_4_bits": Layout(
        compressed(
            "int-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        ),
        int8_of_4_bits,
    ),
    "compressed_mxfp8": Layout(
        compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}), mxfp8
    ),
    "compressed_embedding": Layout(
        {
            **compressed("pack-quantized", {}),
            "config_groups": {
                "group_0": {
                    "targets": ["Embedding"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                },
                "group_1": {
                    "targets": ["re:.*language_model.layers.*"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
                },
            },
        },
        packed(16),
        others={"embed_tokens": packed(2**20, bits=8)},
    ),
    "auto_round": Layout(
        {
            **AUTO_ROUND,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.layers",
            "extra_config": {
                "model.layers.0.self_attn.o_proj": {"bits": 16},
                "layers[.]1[.].*(gate|up)_proj": {"bits": 8, "group_size": 16, "sym": False},
            },
        },
        gptq(8, writes_groups=False),
        left=("layers.0.self_attn.o_proj",),
        others={
            f"layers.1.mlp.{part}_proj": gptq(16, bits=8, has_zeros=True, writes_groups=False)
            for part in ("gate", "up")
        },
    ),
    "auto_round_awq": Layout(
        {
            **AUTO_ROUND,
            "sym": False,
            "packing_format": "auto_round:auto_awq",
            "to_quant_block_names": [["model.layers.0", "model.layers.1"]],
        },
        awq(8),
    ),
    "fbgemm_fp8": Layout({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_channel),
    "gptq_2_bits": Layout({**GPTQ, "bits": 2, "desc_act": False, "sym": True}, gptq(8, bits=2)),
    "gptq_3_bits": Layout(
        {**GPTQ, "bits": 3, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(8, bits=3, has_zeros=True, act_order=True, less=0),
    ),
    "gptq_own_bits": Layout(
        {
            **GPTQ,
            "desc_act": False,
            "sym": True,
            "dynamic": {"+:.*[.]0[.].*down_proj": {"bits": 3, "group_size": 16}, ".*[.](q|k)_proj$": {"bits": 8}},
        },
        gptq(8),
        others={"layers.0.mlp.down_proj": gptq(16, bits=3), "q_proj": gptq(8, bits=8), "k_proj": gptq(8, bits=8)},
    ),
    "gptq_below_zero": Layout({**GPTQ, "desc_act": False, "sym": True}, below_zero(gptq(8))),
    "modelopt_int8": Layout({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, int8()),
    "modelopt_blocks": Layout({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, wide_blocks),
    "modelopt_mixed": Layout(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                **{
                    f"model.language_model.layers.{layer}.self_attn.{one}_proj": {"quant_algo": "FP8"}
                    for layer in (0, 1)
                    for one in "qkvo"
                },
                "model.layers.0.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "model.layers.1.mlp": {"quant_algo": "MXFP8"},
            },
        },
        mxfp8,
        others={
            "self_attn": fp8_tensor("weight_scale", inputs="input_scale"),
            "layers.0.mlp": fp4(("weight", "weight_scale_2"), divides=False),
        },
    ),
}
"""Layouts that differ from the others in how their tensors are read alone, for the tests that look at matrices."""
