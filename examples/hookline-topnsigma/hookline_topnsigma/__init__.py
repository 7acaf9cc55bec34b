"""Top-n-sigma: its argument and its registration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.contracts import Needs, Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class TopNSigmaArguments:
    """What a request asks for: SamplingParams(extra_args={"top_n_sigma": {"n": 1.0}})."""

    n: float = bounded(0.0, 0)
    """Tokens whose logit is more than n standard deviations below the largest are not drawn; 0 draws from all."""


@hookimpl
def register_processors(register: Registrar) -> None:
    register(
        "top_n_sigma",
        "hookline_topnsigma.processor:TopNSigma",
        config=TopNSigmaArguments,
        help="n: keep tokens within n standard deviations of the largest logit",
        needs=Needs(graph_safe=True, sizes_alike=True),
        priority=-50,  # after penalties and bans, before top_k, top_p and min_p
    )
