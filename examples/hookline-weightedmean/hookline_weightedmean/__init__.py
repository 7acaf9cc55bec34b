"""The position-weighted mean: its registration. Imports no torch."""

from __future__ import annotations

from hookline.core.contracts import Registrar, hookimpl

API_VERSION = 2


@hookimpl
def register_poolers(register: Registrar) -> None:
    register(
        "weightedmean_tokens",
        "hookline_weightedmean.pooler:WeightedMean",
        help="the mean of all tokens' hidden states, the later the heavier: SGPT",
    )
