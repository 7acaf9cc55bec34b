"""The scheduler policies that ship with Hookline: their options and their registration. Imports no policy code."""

from dataclasses import dataclass

from core.hookspecs import Registrar, hookimpl

API_VERSION = 1


@dataclass
class PrefillFirstConfig:
    """Waiting prompts before decodes."""

    watermark: float = 0.01
    """Fraction of all KV blocks kept free when a request is admitted beside running ones; spares preemptions."""


@dataclass
class ChunkedConfig:
    """Decodes and prompt chunks in the same step."""

    watermark: float = 0.01
    """Fraction of all KV blocks kept free when a request is admitted beside running ones; spares preemptions."""


@hookimpl
def register_schedulers(register: Registrar) -> None:
    register(
        "prefill_first",
        "plugins.schedulers.prefill_first:PrefillFirst",
        config=PrefillFirstConfig,
        help="first come first served; prompts before decodes; preempts the newest",
    )
    register(
        "chunked",
        "plugins.schedulers.chunked:Chunked",
        config=ChunkedConfig,
        help="decodes first, the rest of each step's token budget goes to prompt chunks",
    )
