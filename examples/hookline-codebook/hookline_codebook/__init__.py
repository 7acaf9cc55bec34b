"""The quantization codebook: its option and its registration. Imports no torch."""

from hookline.core.contracts import QuantizationConfig, Registrar, hookimpl

API_VERSION = 2


@hookimpl
def register_quantizations(register: Registrar) -> None:
    register(
        "codebook",
        "hookline_codebook.codebook:Codebook",
        config=QuantizationConfig,
        help="checkpoints whose weights are bytes that name values of a codebook, one codebook for each linear",
        methods=("codebook",),
    )
