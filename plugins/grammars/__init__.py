"""The grammar back ends that ship with Hookline: their options and their registration. Imports no back end's code."""

from dataclasses import dataclass

from hookline.core.contracts import Needs, Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class LLGuidanceConfig:
    """JSON schemas, regular expressions, choices, Lark and GBNF grammars and structural tags, by llguidance.

    The limits bound the time and memory of a request's grammar; a request that reaches a limit ends with an error. A
    grammar that is not plain is first compiled in a child process, with 0.75 s of processor time and 64 MiB of memory.
    """

    num_threads: int | None = bounded(None, 1, 1024)
    """Most threads that fill the masks of a step. None: four fifths of the machine's cores, 32 at most. Fewer are used
    where that is quicker, which is found by trying; 1: the engine's own thread."""
    max_indentation: int = bounded(32, 0, 1024)
    """json: most spaces or tabs that indent a line. Otherwise one space stands between two tokens of JSON, so that a
    model that is fond of white space does not use up its tokens with it."""
    open_objects: bool = False
    """json: leave an object with `properties` open unless its schema closes it. Without it such an object has no other
    properties, unless its schema says so with additionalProperties, unevaluatedProperties or patternProperties."""
    max_grammar_size: int = bounded(500_000, 1, 2**31 - 1)
    """Most symbols in the rules of a grammar."""
    initial_lexer_fuel: int = bounded(1_000_000, 1, 2**31 - 1)
    """Work to read the regular expressions of a grammar: 300 (deeply repeated ones) to 50,000 a millisecond."""
    step_lexer_fuel: int = bounded(200_000, 1, 2**31 - 1)
    """Work of the lexer for one mask: about 14,000 a millisecond."""
    step_max_items: int = bounded(50_000, 1, 2**31 - 1)
    """Work of the parser for one mask: about 20,000 a millisecond."""
    max_lexer_states: int = bounded(50_000, 1, 2**31 - 1)
    """Most states of the lexer; each takes 1 to 2 KB."""


@hookimpl
def register_grammars(register: Registrar) -> None:
    """Add the back end that ships; its library is an extra, so it may be unavailable."""
    register(
        "llguidance",
        "hookline.plugins.grammars.llguidance_backend:LLGuidance",
        config=LLGuidanceConfig,
        help="JSON schemas, regexes, choices, Lark and GBNF grammars, structural tags; extra 'serve' or 'grammar'",
        needs=Needs(packages=("llguidance",)),
    )
