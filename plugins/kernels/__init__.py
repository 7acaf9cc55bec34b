"""The built-in kernels. Importing this package imports no torch; a kernels file is imported when it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookline.core.contracts import Needs, Registrar, hookimpl

if TYPE_CHECKING:
    from hookline.plugins.kernels.triton_backend import TritonKernels

API_VERSION = 2
__all__ = ["TritonKernels", "register_kernels"]


def __getattr__(name: str) -> Any:
    """TritonKernels, public to be subclassed; imported on first use."""
    if name == "TritonKernels":
        from hookline.plugins.kernels.triton_backend import TritonKernels

        return TritonKernels
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


@hookimpl
def register_kernels(register: Registrar) -> None:
    """Register torch, triton and flash_attn."""
    register(
        "torch",
        "hookline.plugins.kernels.torch_reference:TorchKernels",
        help="plain torch on any device: the reference",
        needs=Needs(
            attention=("window", "scale", "softcap", "sinks", "latent"),
            kv_dtypes=("float8_e4m3fn",),
            batch_invariant=True,
        ),
        priority=0,
    )
    register(
        "triton",
        "hookline.plugins.kernels.triton_backend:TritonKernels",
        help="Triton kernels, tuned for Hopper; reads a shared prefix once a batch",
        needs=Needs(
            devices=("cuda",),
            dtypes=("bfloat16", "float16", "float32"),
            block_size_multiple=16,
            head_dims=(64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
            compute_capability=(8, 0),
            packages=("triton",),
            graph_safe=True,
            graph_prefill=True,
            sizes_alike=True,
            shared_prefix=True,
            batch_invariant=True,
            attention=("window", "scale", "softcap", "sinks", "latent"),
            kv_dtypes=("float8_e4m3fn",),
            preferred_block_size=64,  # 16 costs a tenth of decode and a third of prefill speed (docs/log)
        ),
        priority=20,
    )
    register(
        "flash_attn",
        "hookline.plugins.kernels.flash_attn_backend:FlashAttnKernels",
        help="attention by the flash-attn 2 package, the rest as kernels=triton",
        needs=Needs(
            devices=("cuda",),
            dtypes=("bfloat16", "float16"),
            block_size_multiple=256,
            preferred_block_size=256,
            head_dims=tuple(range(8, 257, 8)),
            compute_capability=(8, 0),
            packages=("flash_attn", "triton"),
            graph_safe=True,
            attention=("window", "scale", "softcap"),
        ),
        priority=10,
    )
