"""The contract of step extensions: code that takes part in the steps of the requests that ask for it.

Legend: T tokens of a step, D hidden, N draws, V vocabulary, R rows of the request table, L tokens of a request, W
numbers that an extension sends to the host for each draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.optional import optional
from hookline.core.contracts.sampler import SamplingBatch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, device, dtype


class TokenTexts(Protocol):
    """The tokenizer as an extension sees it."""

    @property
    def texts(self) -> Sequence[str]:
        """The text of each token id in the middle of a text, special tokens included; empty for ids without a token.

        A token that is a part of a character has a replacement character (U+FFFD) in it. Built at the first access.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens, special ones included."""
        ...


@dataclass(frozen=True)
class ExtensionSpec:
    """The sizes that a step extension is built for, on one rank.

    num_rows: rows of the request table, the padding row included: whatever an extension keeps per request it keeps in
    tensors of that many rows, on `device`. vocab_size: V of the model, which may exceed the tokenizer's. max_model_len:
    longest request, in tokens of prompt and output. tokenizer: only for extensions that set `reads_texts`; None if the
    checkpoint has none.
    config: the engine's values of the `config=` dataclass that the extension was registered with. num_layers,
    hidden_size, dtype: of the whole model and of its residual stream. logits_of: the logits (X, V) float32, over the
    whole vocabulary, of rows (X, D) of the residual stream after any layer, by the model's last norm and its head; to
    be called in `after_draw` or `before_draw`, on every rank.
    """

    num_rows: int
    vocab_size: int
    max_model_len: int
    device: device
    tokenizer: TokenTexts | None = None
    config: Any = None
    num_layers: int = 0
    hidden_size: int = 0
    dtype: dtype | None = None
    logits_of: Callable[[Tensor], Tensor] | None = None


@dataclass
class FromSamplingParams:
    """Base class for arguments whose fields are read from the fields of the same names in SamplingParams.

    Other arguments come from `SamplingParams.extra_args[name]`, and where a request does not set them, from the
    engine's settings of it.
    """


@dataclass(frozen=True)
class RequestFacts:
    """The facts about a request that the methods on the host get beside its arguments."""

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
    """See ExtensionSpec."""
    state: Any = None
    """The state that `start` returned, for `encode`; None for a class without `start`."""


@dataclass(frozen=True)
class LogitsRows:
    """The N rows of a call of `before_draw` or `after_draw`: their requests, and the arguments of these.

    All on the device. rows_N: int64, rows of the request table, as in `load`; padding names the last row. columns: each
    int, float or bool field of the arguments, (N,) int64 or float32 (bool as int64); a row whose request does not use
    the extension holds the fields' defaults. sampling: temperature, seed and position (the number of tokens before the
    draw) of each row.
    tokens_RL, num_prompt_tokens_N: only for extensions that set `reads_tokens`, and only valid for rows that use such
    an extension: row r of tokens_RL (R, L) int32 holds the request's tokens, the prompt first; places at and beyond
    sampling.position_N are stale. max_num_tokens: an upper bound of the positions.
    streams: for each layer of `reads_layers`, the residual stream (N, D) after it, at the token that the draw follows;
    in the model's dtype.
    """

    rows_N: Tensor
    columns: Mapping[str, Tensor]
    sampling: SamplingBatch
    tokens_RL: Tensor | None
    num_prompt_tokens_N: Tensor | None
    max_num_tokens: int
    streams: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerRows:
    """The T tokens of one call of `after_layer`. All on the device, the same for all layers of a step.

    rows_T: int64, for each token its request's row of the request table; padding names the last row. positions_T:
    int64, its place in the request. columns: as in LogitsRows, (T,).
    """

    rows_T: Tensor
    positions_T: Tensor
    columns: Mapping[str, Tensor]


class StepExtension(Protocol):
    """Takes part in the steps of the requests that ask for it. For classes to extend; a class has the methods it needs.

    Constructed as `Extension(spec)` on every rank, when a request first uses it. It is registered with `arguments=`, a
    dataclass whose fields are a request's arguments and whose defaults mean "not used", and may have `config=`, a
    dataclass of the engine's own settings of it. Extensions run in descending priority, ties in order of registration,
    on every rank alike. A step runs only extensions that one of its requests uses; a step without extensions has the
    same CUDA graphs and launches as if none were installed.

    On the device, for the requests that use it: `load` keeps a request's values when it gets a row; `after_layer` sees
    and changes the residual stream; `before_draw` changes logits; `after_draw` computes numbers for the host. On the
    host: `start`, `encode`, `num_draws`, `on_token`, `on_result`, `forget`.
    """

    reads_tokens: bool = False
    """Whether LogitsRows has the tokens of the requests."""
    reads_texts: bool = False
    """Whether ExtensionSpec and RequestFacts have the tokenizer."""
    follows_tokens: bool = False
    """Whether a draw depends on the state that `on_token` left after the token before it: `encode` is then called again
    after each token and `load` gets its values before the next draw, so no step is launched while such a request's
    token is unknown; the class must have all three methods. Otherwise both are called when the request is admitted, and
    again after a preemption."""
    waits_for_host: bool = False
    """Whether its methods on the device read values of tensors on the host (`item`, `tolist`, a condition), which loses
    the overlap of host and device. Excludes Needs(graph_safe=True)."""
    excludes: Sequence[str] = ()
    """Names of other extensions, and of fields of SamplingParams, that a request may not combine with it; `tp` or `pp`:
    engines of several ranks or stages refuse it."""
    layers: Sequence[int] = ()
    """The layers of the model, counted from 0, after which `after_layer` is called; mostly set by the constructor. With
    stages, each stage calls it after its own layers."""
    reads_layers: Sequence[int] = ()
    """The layers after which LogitsRows.streams has the residual stream; mostly set by the constructor."""
    draw_method: str = "before_draw"
    """The name of the class's `before_draw` method."""
    result_width: int = 0
    """W: how many numbers `after_draw` returns for each draw; mostly set by the constructor."""
    result_dtype: str = "int64"
    """The dtype of these numbers, "int64" or "float32"."""

    def __init__(self, spec: ExtensionSpec) -> None:
        """Allocate all tensors with a row for each request here: a captured graph does not see later allocations."""
        ...

    # ------------------------------------------------------------------------------------------------- on the device

    @optional
    def load(self, row: int, values_X: Tensor) -> None:
        """Keep these values, on the device, for the request that now owns this row.

        values_X: int64, the result of `encode`; empty if this request does not use the extension and the row's previous
        request did. Called outside of graphs, before the request's first step.
        """
        return

    @optional
    def after_layer(self, layer: int, hidden_TD: Tensor, rows: LayerRows) -> Tensor:
        """The residual stream after one of `layers`, changed: in place or in a new tensor of the same form.

        Tokens of requests that do not use it stay as they are. A request whose class has this method shares cached
        prompts only with requests of equal arguments, since keys and values of later layers depend on it.
        Shapes: hidden_TD (T, D), of all tokens of the step, in the model's dtype.
        Device: no host sync unless waits_for_host. With Needs(graph_safe=True) it is captured, in a graph of layers.
        """
        return hidden_TD

    @optional
    def before_draw(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """The logits of N draws, changed: in place or in a new tensor of the same form.

        It must not write to `rows`.
        Shapes: logits_NV (N, V) float32 over the whole vocabulary, not yet divided by the temperature. -inf forbids a
        token. A row's result depends on that row alone; rows whose columns hold the defaults stay as they are.
        Device: no host sync unless waits_for_host. With Needs(graph_safe=True) it is captured, in a graph of draws.
        """
        return logits_NV

    @optional
    def after_draw(self, tokens_N: Tensor, rows: LogitsRows) -> Tensor | None:
        """Numbers for the host about N draws, which travel there together with the tokens; None for none.

        tokens_N: int64, the drawn tokens; negative where none was drawn. It must write to neither.
        Shapes: (N, result_width) of result_dtype.
        Device: as before_draw, and in the same graph.
        """
        return None

    # --------------------------------------------------------------------------------------------------- on the host

    @staticmethod
    @optional
    def num_draws(arguments: Any, request: RequestFacts) -> int | None:
        """How many of the request's first draws it takes part in, called on the host: 0 for none, None for all.

        Not called for arguments that equal their defaults, which change nothing. May be a classmethod.
        """
        return None

    @staticmethod
    @optional
    def encode(arguments: Any, request: RequestFacts) -> Sequence[int]:
        """Further int64 values for `load`, made on the host from arguments that columns cannot hold, such as lists.

        A class must have both this method and `load` if its dataclass has a field of another type than int, float or
        bool, or if this method returns any values. May be a classmethod.
        Raises: RequestError for arguments that the request cannot have.
        """
        return ()

    @staticmethod
    @optional
    def start(arguments: Any, request: RequestFacts) -> Any:
        """A request's state on the host, which `on_token` and `on_result` change and `encode` reads as `request.state`.

        Called when the request arrives, for each of n completions; the state is kept until the request ends, through
        preemptions. The host follows a request's tokens only if one of its extensions has this method or `on_token`;
        other requests do not have that cost.
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
        Raises: any exception ends the request with an error that names the extension.
        """
        return None

    @staticmethod
    @optional
    def on_result(state: Any, values_W: np.ndarray) -> Any:
        """Turn the numbers that `after_draw` computed for one of the request's tokens into the client's result.

        Called once for each of its tokens, in order, before `on_token` of the same token, on the thread that plans.
        Returns plain data (JSON types), which is appended to RequestOutput.extensions[name] and streamed with the
        token; without this method, the list of the numbers.
        values_W: (result_width,) of result_dtype; a copy.
        Raises: any exception ends the request with an error that names the extension.
        """
        return values_W.tolist()

    @staticmethod
    @optional
    def forget(state: Any) -> None:
        """The request has ended, for whatever reason; called once for each state that `start` made."""
        return
