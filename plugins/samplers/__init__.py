"""The samplers that ship with Hookline: their options and their registration. Imports no torch."""

from dataclasses import dataclass

from core.contracts import Needs
from core.hookspecs import Registrar, hookimpl

API_VERSION = 1


@dataclass
class GumbelConfig:
    """Gumbel-max sampling."""

    greedy: bool = False
    """Take the most likely token for every request, whatever its temperature."""


@hookimpl
def register_samplers(register: Registrar) -> None:
    register(
        "gumbel",
        "plugins.samplers.gumbel:Gumbel",
        config=GumbelConfig,
        help="Gumbel-max with a stateless RNG keyed by seed, position and token id; temperature 0 is greedy",
        needs=Needs(graph_safe=True, vocabulary_shards=True),
    )
