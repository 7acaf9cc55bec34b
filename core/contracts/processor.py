"""What a logits processor is given and what it implements.

Legend: N rows of a call, V vocabulary, R rows of the request table, L tokens of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.optional import optional
from hookline.core.contracts.sampler import SamplingBatch

if TYPE_CHECKING:
    from torch import Tensor, device


class TokenTexts(Protocol):
    """What a processor may know of the tokenizer."""

    @property
    def texts(self) -> Sequence[str]:
        """The text of each token inside of a text, special ones as they are written; empty for ids without one.

        A token that is a part of a character has a replacement character (U+FFFD) in it. Made once, when asked for.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens, special ones included."""
        ...


@dataclass(frozen=True)
class ProcessorSpec:
    """The sizes a logits processor is built for.

    num_rows: rows of the request table, the padding row included: whatever a processor keeps per request it keeps in
    tensors of that many rows, on `device`. vocab_size: V of the model, which may exceed the tokenizer's. max_model_len:
    longest request, in tokens of prompt and output. tokenizer: only for processors that set `reads_texts`; None if the
    checkpoint has none.
    """

    num_rows: int
    vocab_size: int
    max_model_len: int
    device: device
    tokenizer: TokenTexts | None = None


@dataclass
class FromSamplingParams:
    """Base class for arguments whose fields are read from the fields of the same names in SamplingParams.

    Other processors' arguments come from `SamplingParams.extra_args[name]`, and where a request does not set them, from
    the engine's `processors.name`.
    """


@dataclass(frozen=True)
class RequestFacts:
    """What the methods on the host may know of a request beside their own arguments."""

    num_prompt_tokens: int
    """Length of the prompt."""
    temperature: float
    """0 means greedy."""
    stop_ids: frozenset[int]
    """End-of-sequence and stop tokens that end it."""
    vocab_size: int
    """V: every token id is below it."""
    has_logprobs: bool = False
    """Whether the log-probabilities of its tokens are computed, which SamplingParams.logprobs asks for."""
    tokenizer: TokenTexts | None = None
    """See ProcessorSpec."""
    state: Any = None
    """The state that `start` returned, for `encode`; None for a class without `start`."""


@dataclass(frozen=True)
class LogitsRows:
    """The N rows of one call of `process`: which requests they are and what those asked for. All on the device.

    rows_N: int64, rows of the request table, as in `load`; padding names the last row. columns: each int, float or bool
    field of the arguments, (N,) int64 or float32 (bool as int64); a row whose request does not use the processor holds
    the fields' defaults. sampling: temperature, seed and position (the number of tokens before the draw) of each row.
    tokens_RL, num_prompt_tokens_N: only for processors that set `reads_tokens`, and only valid for rows that use such a
    processor: row r of tokens_RL (R, L) int32 holds the request's tokens, the prompt first; those at and beyond
    sampling.position_N are stale. max_num_tokens: an upper bound of the positions.
    """

    rows_N: Tensor
    columns: Mapping[str, Tensor]
    sampling: SamplingBatch
    tokens_RL: Tensor | None
    num_prompt_tokens_N: Tensor | None
    max_num_tokens: int


class LogitsProcessor(Protocol):
    """Changes logits before the sampler draws, for the requests that ask for it. For classes to extend.

    Constructed as `Processor(spec)`. It is registered with a dataclass, `config=`, whose fields are a request's
    arguments and whose defaults mean "leave the logits alone". Processors run in descending priority, ties in order of
    registration, on every rank alike and over the whole vocabulary. A step runs only those that one of its requests
    uses.
    """

    reads_tokens: bool = False
    """Whether LogitsRows has the tokens of the requests."""
    reads_texts: bool = False
    """Whether ProcessorSpec and RequestFacts have the tokenizer."""
    follows_tokens: bool = False
    """Whether a draw depends on what `on_token` made of the token before it: `encode` is then asked again after each
    token and `load` gets its values before the next draw, so no step is launched while such a request's token is
    unknown; the class must have all three. Otherwise they come when the request is admitted, also again after a
    preemption."""

    def __init__(self, spec: ProcessorSpec) -> None:
        """Allocate all that is kept per row here: a captured graph would not see what is allocated later."""
        ...

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """The logits of N draws, changed: in place or in a new tensor of the same form.

        It must not write to `rows`.
        Shapes: logits_NV (N, V) float32 over the whole vocabulary, not yet divided by the temperature. -inf forbids a
        token. A row's result depends on that row alone; rows whose columns hold the defaults stay as they are.
        Device: no host sync. With Needs(graph_safe=True) it is captured, in a graph of draws.
        """
        ...

    # ------------------------------------------------------------------------------------ what a class may leave out

    @staticmethod
    @optional
    def num_draws(arguments: Any, request: RequestFacts) -> int | None:
        """How many of the request's first draws it changes, asked on the host: 0 for none, None for all.

        Not asked for arguments that equal their defaults, which change nothing. May be a classmethod.
        """
        return None

    @staticmethod
    @optional
    def encode(arguments: Any, request: RequestFacts) -> Sequence[int]:
        """Further int64 values for `load`, made on the host: what columns cannot hold, such as lists.

        A class whose dataclass has a field of another type than int, float or bool must have both it and `load`; so
        must one that returns any. May be a classmethod.
        Raises: RequestError for arguments that the request cannot have.
        """
        return ()

    @optional
    def load(self, row: int, values_X: Tensor) -> None:
        """Keep those values, on the device, for the request that now owns a row.

        They are empty if this request does not use the processor and the row's previous request did. Called outside of
        graphs, before the first draw.
        """
        return

    @staticmethod
    @optional
    def start(arguments: Any, request: RequestFacts) -> Any:
        """A request's state on the host, which `on_token` changes and `encode` reads as `request.state`.

        Made when the request arrives, one for each of n completions, and kept until it ends: preemptions do not
        change it. The host follows the tokens of requests of a class that has this or `on_token`; other classes do not
        have that cost.
        Raises: RequestError for arguments that the request cannot have.
        """
        return None

    @staticmethod
    @optional
    def on_token(state: Any, token_id: int, logprob: float | None) -> str | None:
        """A token of the request became known: change the state. A text ends the request with this token.

        Called once for each of its tokens, in order, on the thread that plans, so it must be quick. The text becomes
        the output's stop_reason and the token counts as a stop token: it is in token_ids and not in the text. Before
        min_tokens nothing ends. With overlap the device may have drawn one more token, which is discarded.
        logprob: of the token among the unprocessed logits at temperature 1; None unless the request asks for logprobs.
        Raises: whatever it raises ends the request with an error that names the processor.
        """
        return None
