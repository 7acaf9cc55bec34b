"""XGrammar behind Hookline's contract: grammars come compiled from another process, and are followed here."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xgrammar

from hookline.core.contracts import Grammar, GrammarBackend, GrammarMatcher, GrammarVocabulary, StructuredOutputs
from hookline.core.errors import RequestError, clipped
from hookline_xgrammar.compiler import tokenizer_info

if TYPE_CHECKING:
    from hookline_xgrammar import XGrammarConfig

KINDS = ("json", "regex", "choice", "grammar")


class XGrammar(GrammarBackend):
    """See XGrammarConfig."""

    def __init__(self, config: XGrammarConfig, vocabulary: GrammarVocabulary) -> None:
        self.config = config
        # Without a text special tokens cannot spell any: a stop token `<end>` is not the choice "<end>".
        texts = [b"" if index in vocabulary.special_ids else token for index, token in enumerate(vocabulary.tokens)]
        tokens = [base64.b64encode(text).decode() for text in texts]
        described = {"tokens": tokens, "stop_ids": sorted(vocabulary.stop_ids)}
        self.tokenizer = tokenizer_info(described)
        self.stop_ids = vocabulary.stop_ids
        self.text_W = _mask_of_text(vocabulary)
        self._asking = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hookline_xgrammar.compiler", str(config.compile_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        weakref.finalize(self, _end, self._process)
        self._ask(json.dumps(described))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._asking:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            said = self._process.stdout.readline()
        if not said:
            raise RuntimeError("the process that compiles grammars has ended")
        return said

    def compile(self, wanted: StructuredOutputs) -> XGrammarGrammar:
        """See GrammarBackend."""
        if wanted.kind not in KINDS:
            raise RequestError(f"xgrammar knows {', '.join(KINDS)} here, and no {wanted.kind}")
        question = {"kind": wanted.kind, "value": wanted.value, "whitespace": wanted.whitespace}
        said = json.loads(self._ask(json.dumps({**question, "max_whitespace": self.config.max_whitespace})))
        if "error" in said:
            raise RequestError(clipped(" ".join(said["error"].split()), 300))
        compiled = xgrammar.CompiledGrammar.deserialize_json(said["grammar"], self.tokenizer)
        return XGrammarGrammar(self, compiled)


class XGrammarGrammar(Grammar):
    """A compiled grammar."""

    def __init__(self, backend: XGrammar, compiled: xgrammar.CompiledGrammar) -> None:
        self.backend, self.compiled = backend, compiled

    @property
    def num_bytes(self) -> int:
        """See Grammar."""
        return int(self.compiled.memory_size_bytes)

    def matcher(self) -> XGrammarMatcher:
        """See Grammar."""
        return XGrammarMatcher(self)


class XGrammarMatcher(GrammarMatcher):
    """XGrammar's matcher, and the mask of what is text at all."""

    def __init__(self, grammar: XGrammarGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._text_W, self._stop_ids = grammar.backend.text_W, grammar.backend.stop_ids
        self._scratch_W = np.zeros_like(self._text_W)

    def fill(self, mask_W: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """See GrammarMatcher."""
        mask_W = mask_W[: len(self._text_W)]
        if self._matcher.fill_next_token_bitmask(torch.from_numpy(mask_W).unsqueeze(0)):
            mask_W &= self._text_W  # it may allow tokens of no text
        else:  # it forbids nothing
            mask_W[:] = self._text_W

    def advance(self, tokens: Sequence[int]) -> bool:
        """See GrammarMatcher."""
        return all(self._is_text(token_id) and self._matcher.accept_token(token_id) for token_id in tokens)

    def _is_text(self, token_id: int) -> bool:
        return bool(self._text_W[token_id // 32] >> token_id % 32 & 1)

    def rollback(self, num_tokens: int) -> None:
        """See GrammarMatcher."""
        self._matcher.rollback(num_tokens)

    @property
    def is_accepting(self) -> bool:
        """See GrammarMatcher."""
        return bool(self._matcher.is_completed() or self._matcher.is_terminated())

    @property
    def is_terminated(self) -> bool:
        """See GrammarMatcher."""
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        self._scratch_W[:] = 0
        self.fill(self._scratch_W)
        for token_id in self._stop_ids:
            self._scratch_W[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).astype(np.int32))
        return not self._scratch_W.any()


def _mask_of_text(vocabulary: GrammarVocabulary) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tokens that spell something, and those that end it."""
    is_text = [
        (token != b"" and token_id not in vocabulary.special_ids) or token_id in vocabulary.stop_ids
        for token_id, token in enumerate(vocabulary.tokens)
    ]
    bits = np.zeros(32 * -(-len(is_text) // 32), dtype=np.bool_)
    bits[: len(is_text)] = is_text
    return np.packbits(bits, bitorder="little").view(np.int32)


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.kill()
    process.wait()
