"""The built-in kernels. Importing this package imports no torch; a kernels file is imported when it is chosen."""

from __future__ import annotations

from core.contracts import Needs
from core.hookspecs import Registrar, hookimpl

API_VERSION = 1


@hookimpl
def register_kernels(register: Registrar) -> None:
    register(
        "torch",
        "plugins.kernels.torch_reference:TorchKernels",
        help="plain torch on any device: the reference",
        needs=Needs(),
        priority=0,
    )
