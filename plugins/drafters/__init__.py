"""The drafters that ship with Hookline: their options and their registration. Imports no torch."""

from dataclasses import dataclass

from hookline.core.contracts import Registrar, hookimpl

API_VERSION = 2


@dataclass
class LookupConfig:
    """Drafts from a request's own tokens: what followed the last time the same tokens came."""

    k: int = 4
    """Most drafts for a request in a step, at least 1."""
    min_match: int = 2
    """Fewest tokens that must be the same, at least 1."""
    max_match: int = 8
    """Most tokens that are compared; at least min_match."""
    adaptive: bool = True
    """Whether a request whose drafts are all wrong has none in its next step, then in two steps, and so on up to 64."""


@dataclass
class SyntheticConfig:
    """For benchmarks: a stated number of tokens is kept of each step, whether they are right or not."""

    k: int = 4
    """Drafts for a request in a step, at least 1."""
    length: float = 3.0
    """Tokens that a request keeps of a step with k drafts, in the mean; from 1 to 1 + k."""


@hookimpl
def register_drafters(register: Registrar) -> None:
    """Two search the request's own tokens on the host; the third is for benchmarks."""
    register(
        "ngram",
        "hookline.plugins.drafters.lookup:Ngram",
        config=LookupConfig,
        help="drafts from the last place where a request's newest tokens came before",
    )
    register(
        "suffix",
        "hookline.plugins.drafters.lookup:Suffix",
        config=LookupConfig,
        help="drafts from the most frequent continuation of the longest suffix that came before",
    )
    register(
        "synthetic",
        "hookline.plugins.drafters.synthetic:Synthetic",
        config=SyntheticConfig,
        help="for benchmarks alone: keeps a stated number of drafts, so that answers are not the model's",
    )
