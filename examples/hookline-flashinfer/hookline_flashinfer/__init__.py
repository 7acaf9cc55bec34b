"""FlashInfer's attention: its option, what it needs, and its registration. Imports neither torch nor flashinfer."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.contracts import Needs, Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class FlashInferConfig:
    """Attention by FlashInfer, the rest by Hookline's Triton kernels."""

    workspace_mib: int = bounded(256, 1)
    """Device memory for partial results of long contexts that are split over the card, in MiB."""


@hookimpl
def register_kernels(register: Registrar) -> None:
    register(
        "flashinfer",
        "hookline_flashinfer.kernels:FlashInferKernels",
        config=FlashInferConfig,
        help="attention by the FlashInfer package, the rest as kernels=triton",
        needs=Needs(
            devices=("cuda",),
            dtypes=("bfloat16", "float16"),
            block_size_multiple=16,
            head_dims=(64, 128),
            compute_capability=(8, 0),
            packages=("flashinfer", "triton"),
            graph_safe=True,
        ),
        priority=5,
    )
