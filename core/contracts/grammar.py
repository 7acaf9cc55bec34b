"""The contract of grammar back ends, which say which tokens may come next.

Legend: V tokens of the vocabulary, W >= ceil(V / 32) int32 words of a mask: bit t % 32 of word t // 32 is token t, and
a set bit allows it. N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.optional import optional
from hookline.core.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import numpy as np

    MaskRow = np.ndarray[tuple[int], np.dtype[np.int32]]
    MaskRows = np.ndarray[tuple[int, int], np.dtype[np.int32]]


@dataclass(frozen=True)
class GrammarVocabulary:
    """The tokenizer's vocabulary as a back end sees it.

    tokens: the bytes of each of the V token ids, in order; b"" where an id has none, as where the model's vocabulary is
    larger than the tokenizer's: such an id is never allowed. special_ids: tokens that stand for no text, such as the
    marks of a chat's turns. stop_ids: the checkpoint's end-of-sequence tokens, at least one. encode: a text's token
    ids, without the special tokens that begin or end a prompt.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    stop_ids: frozenset[int]
    encode: Callable[[str], list[int]]


class GrammarMatcher(Protocol):
    """The state of one completion in its grammar. For classes to extend. Used by one thread at a time."""

    def fill(self, mask_W: MaskRow) -> None:
        """Set the bits of the tokens that may come next; the words are zero before.

        If several sequences of tokens spell the same text, it may forbid tokens that the tokenizer would not choose.

        The vocabulary's stop_ids are allowed exactly where the text so far is complete, special tokens only where the
        grammar names them. If anything raises, or no bit is set, the request ends with an error: nothing is drawn for
        it that was not allowed.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by these tokens; False if they do not fit. A single token that does not fit changes nothing then.

        The vocabulary's stop_ids fit where the text is complete, and end it. Never called once `is_terminated`.
        Called for sampled tokens, where a token that does not fit ends the request with an error, and one by one for
        drafts, which may not fit (see `rollback`).
        Raises: RequestError with one line if a limit is reached. The request ends with it if the token was sampled;
        after a draft, core makes a new matcher and advances it by the request's tokens.
        """
        ...

    @optional
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens that `advance` took.

        Called after masks were filled for drafts. Without this method the back end's requests have no drafts.
        """
        raise AssertionError("left out")

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is complete; it may still go on."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete and nothing can follow: the request ends with finish_reason "stop"."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by all requests that ask for the same grammar. For classes to extend."""

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes; the engine keeps the most recently used grammars, up to a bound in bytes."""
        ...

    def matcher(self) -> GrammarMatcher:
        """A new matcher at the beginning, independent of all others.

        Called in the step loop, so it may take only microseconds.
        """
        ...


class GrammarBackend(Protocol):
    """Compiles grammars. For classes to extend.

    Constructed as `Backend(config, vocabulary)` in a separate thread: for a server and an AsyncLLM while the weights
    load (engine.prepare_grammars), otherwise when the first request needs it.
    """

    def __init__(self, config: Any, vocabulary: GrammarVocabulary) -> None:
        """Prepare the vocabulary. config: an instance of the registered dataclass; None without one."""
        ...

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar of `wanted.kind` and `wanted.value` (of json and structural_tag: JSON text; of a choice: texts).

        Runs in a thread beside the step loop, several at a time: code that holds the interpreter's lock (GIL) delays
        the steps of all requests. It must end within about a second for any grammar: bound sizes, states and time. A
        request whose grammar takes longer than two seconds ends with an error. Core handles `wanted.after` itself.
        Raises: RequestError with one line for a grammar that is invalid, too large, or of a kind that is not supported.
        """
        ...

    @classmethod
    @optional
    def cannot_hold(cls, keyword: str, value: Any) -> bool:
        """Whether this back end cannot enforce a keyword of a JSON schema with this value.

        Such a keyword is left out of schemas before `compile` gets them, and callers are told; without this method
        `compile` must refuse it. Not asked about keywords that every back end must enforce: the names of properties and
        items, `$ref`, `allOf` and `anyOf`. For `patternProperties` the question is whether an object may have several
        patterns, for `properties` whether they may be combined with `minProperties` and `maxProperties`: then the value
        is the schema of the object. `oneOf` reaches no back end; core turns it into `anyOf`.
        Called in front ends too, so it may take only microseconds for most values.
        """
        raise AssertionError("left out")

    @optional
    def fill(self, matchers: Sequence[GrammarMatcher], masks_NW: MaskRows) -> None:
        """`matchers[n].fill(masks_NW[n])` for each, all at once, for back ends that can do it in parallel.

        If it raises, core fills the rows one by one to find the request at fault.
        """
        raise AssertionError("left out")
