"""The quantizations that ship with Hookline: their options and their registration. Imports no torch."""

from dataclasses import dataclass

from hookline.core.contracts import QuantizationConfig, Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class RoundedConfig(QuantizationConfig):
    """Weights are quantised while they are loaded, from a checkpoint that is not quantised, or from random ones."""

    skip: tuple[str, ...] = ("lm_head", "embed_out")
    """Linears that stay as they are: names, or their last parts; an empty list quantises the head too."""


@dataclass
class RoundedInt4Config(RoundedConfig):
    """Weights are rounded to four bits while they are loaded."""

    group_size: int = bounded(128, 2, 2**20)
    """Inputs that share a scale."""
    zero_points: bool = True
    """Whether each group has a zero point as well."""


@hookimpl
def register_quantizations(register: Registrar) -> None:
    """Quantizations that quantise while loading, and quantizations that read quantised checkpoints."""
    on_the_fly = "hookline.plugins.quantizations.on_the_fly"
    register(
        "fp8",
        f"{on_the_fly}:RoundedFp8",
        config=RoundedConfig,
        help="any checkpoint in FP8 (e4m3) with a scale for each output, quantised while it is loaded",
    )
    register(
        "fp8_block",
        f"{on_the_fly}:RoundedFp8Blocks",
        config=RoundedConfig,
        help="any checkpoint in FP8 (e4m3) with a scale for each 128x128 block, quantised while it is loaded",
    )
    register(
        "int8",
        f"{on_the_fly}:RoundedInt8",
        config=RoundedConfig,
        help="any checkpoint in 8-bit integers with a scale for each output, quantised while it is loaded",
    )
    register(
        "int4",
        f"{on_the_fly}:RoundedInt4",
        config=RoundedInt4Config,
        help="any checkpoint in 4-bit integers by groups of inputs, quantised while it is loaded",
    )
    register(
        "fp8_checkpoint",
        "hookline.plugins.quantizations.fp8:Fp8",
        config=QuantizationConfig,
        help="checkpoints with quant_method fp8: blocks or one scale, as Qwen3-*-FP8 and DeepSeek have them",
        methods=("fp8",),
    )
    register(
        "fbgemm_fp8",
        "hookline.plugins.quantizations.fp8:FbgemmFp8",
        config=QuantizationConfig,
        help="checkpoints with quant_method fbgemm_fp8: FP8 with a scale for each output",
        methods=("fbgemm_fp8",),
    )
    register(
        "gguf",
        "hookline.plugins.quantizations.gguf:Gguf",
        config=QuantizationConfig,
        help="GGUF files of llama, qwen2, qwen3, qwen3moe, olmo2 and gemma3, in all their types",
        methods=("gguf",),
    )
    readers: dict[str, tuple[tuple[str, ...], str, str]] = {
        "compressed_tensors": (
            ("compressed-tensors",),
            "CompressedTensors",
            "compressed-tensors: FP8, int8, integers of 2 to 8 bits packed in groups, NVFP4, MXFP4 and MXFP8",
        ),
        "awq": (("awq", "quant_config.json"), "Awq", "AWQ: int4 in groups with zero points"),
        "auto_round": (
            ("auto-round", "intel/auto-round"),
            "AutoRound",
            "AutoRound, in the layouts of GPTQ and AWQ",
        ),
        "gptq": (
            ("gptq", "quantize_config.json"),
            "Gptq",
            "GPTQ: integers of 2, 3, 4 and 8 bits in groups, with and without act-order",
        ),
        "modelopt": (
            ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "hf_quant_config.json"),
            "Modelopt",
            "NVIDIA modelopt: FP8, NVFP4, MXFP8, MXFP4, int8, also several of them by linear",
        ),
    }
    for name, (methods, target, told) in readers.items():
        register(
            name,
            f"hookline.plugins.quantizations.{name}:{target}",
            config=QuantizationConfig,
            help=f"checkpoints of {told}",
            methods=methods,
        )
