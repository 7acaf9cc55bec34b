"""llguidance as a grammar back end: the suite, and what is its own."""

from hookline.core.contracts import GrammarVocabulary
from hookline.core.testing.grammar_suite import GrammarSuite
from hookline.plugins.grammars import LLGuidanceConfig
from hookline.plugins.grammars.llguidance_backend import LLGuidance


class TestLLGuidance(GrammarSuite):
    def make(self, vocabulary: GrammarVocabulary) -> LLGuidance:
        return LLGuidance(LLGuidanceConfig(num_threads=1), vocabulary)
