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


@hookimpl
def register_drafters(register: Registrar) -> None:
    """Both search the request's own tokens on the host."""
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
