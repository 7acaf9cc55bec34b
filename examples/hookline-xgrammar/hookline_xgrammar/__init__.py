"""XGrammar as a grammar back end: its option and its registration. Imports no xgrammar."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.contracts import Needs, Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class XGrammarConfig:
    """Structured output by XGrammar."""

    compile_s: float = bounded(1.5, above=0, high=2.0)
    """Longest compile of a grammar, in seconds, after which its process is killed and the request ends."""
    max_whitespace: int = bounded(32, 1, 1024)
    """json: most white space in a row where it is allowed."""


@hookimpl
def register_grammars(register: Registrar) -> None:
    register(
        "xgrammar",
        "hookline_xgrammar.backend:XGrammar",
        config=XGrammarConfig,
        help="JSON schemas, regexes, choices and GBNF grammars",
        needs=Needs(packages=("xgrammar",)),
        priority=-10,  # of two that are installed, grammars=auto takes the one that ships with Hookline
    )
