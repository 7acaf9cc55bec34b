"""xgrammar against Hookline's conformance suite, beside the engine, and without its package."""

from __future__ import annotations

import importlib.util
import re

import pytest
from hookline_xgrammar import XGrammarConfig, register_grammars

from hookline.core.contracts import GrammarVocabulary
from hookline.core.testing.grammar_suite import GrammarSuite

HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
needs_xgrammar = pytest.mark.skipif(not HAS_XGRAMMAR, reason="xgrammar is not installed")


@needs_xgrammar
class TestXGrammar(GrammarSuite):
    kinds = ("json", "regex", "choice", "grammar")
    _made = None

    def make(self, vocabulary: GrammarVocabulary):
        from hookline_xgrammar.backend import XGrammar

        if TestXGrammar._made is None:  # its process takes seconds to start
            TestXGrammar._made = XGrammar(XGrammarConfig(), vocabulary)
        return TestXGrammar._made


@needs_xgrammar
def test_a_completion_follows_it() -> None:
    from hookline import LLM, SamplingParams

    params = SamplingParams(max_tokens=16, seed=1, structured_outputs={"regex": "[0-9]{3}-[a-z]{2}"})
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "cpu_cache_gib": 0.1}
    with LLM(grammars="xgrammar", device="cpu", engine=engine) as llm:
        (output,) = llm.generate("x = ", params)
    assert output.error is None and re.fullmatch("[0-9]{3}-[a-z]{2}", output.text)


def test_it_is_registered_without_importing_its_package() -> None:
    names = []
    register_grammars(register=lambda name, target, **options: names.append((name, options["config"])))
    assert names == [("xgrammar", XGrammarConfig)]
