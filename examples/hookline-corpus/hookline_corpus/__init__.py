"""Drafts from a text of yours: their options and their registration. Imports no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.contracts import Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class CorpusConfig:
    """Drafts from a text file: what follows there after a request's newest tokens."""

    corpus: str = ""
    """The text file, in UTF-8: templates, boilerplate, answers of before."""
    tokenizer: str = ""
    """The checkpoint's tokenizer.json, which makes tokens of the text."""
    k: int = bounded(4, 1, 64)
    """Most drafts for a request in a step."""
    min_match: int = bounded(3, 1, 64)
    """Fewest tokens that must be the same in the text."""
    max_match: int = bounded(16, 1, 64)
    """Most tokens that are compared; at least min_match."""
    adaptive: bool = True
    """Whether a request whose drafts are all wrong has none in its next step, then in two steps, and so on up to 64."""


@hookimpl
def register_drafters(register: Registrar) -> None:
    register(
        "corpus",
        "hookline_corpus.drafter:Corpus",
        config=CorpusConfig,
        help="drafts from a text file (drafter.corpus, drafter.tokenizer)",
    )
