"""The results that callers get: outputs of finished requests, Deltas of running ones, usage and times. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.core.util.arrays import VectorArray


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability under the model, and the most likely tokens with their log-probabilities.

    They are of the model's unprocessed distribution: before bias, penalties, temperature, top_k, top_p and min_p.
    token_id: the sampled token, or the prompt's. logprob: at most 0. top: (token id, log-probability), most likely
    first, as many as asked for; the token itself may be among them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """It ended with an end-of-sequence or stop token, a stop string, a complete grammar, or its vector."""
    LENGTH = "length"
    """It reached max_tokens, or the longest sequence that the engine serves."""
    ABORT = "abort"
    """Its caller or a time limit ended it; RequestOutput.error has the reason if it was not the caller."""
    ERROR = "error"
    """It was refused, or a fault ended it; RequestOutput.error says why, and is_fault tells the two apart."""


@dataclass(frozen=True)
class Usage:
    """Tokens of a request.

    num_prompt_tokens: of the prompt, counted once for all completions. num_cached_tokens: prompt tokens found in the
    prefix cache. num_completion_tokens: of all completions, including the tokens that stopped them.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int

    @property
    def num_total_tokens(self) -> int:
        """Prompt and completion."""
        return self.num_prompt_tokens + self.num_completion_tokens


@dataclass(frozen=True)
class Timings:
    """Moments of a request's life, in seconds on the engine's clock (time.monotonic); None for events that never came.

    arrival_s: it was submitted. scheduled_s: its first step was planned. first_token_s: its first token was known on
    the host. finished_s: it ended, for whatever reason.
    """

    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float

    @property
    def queue_s(self) -> float:
        """How long it waited for its first step; its whole life if it never had one."""
        return (self.finished_s if self.scheduled_s is None else self.scheduled_s) - self.arrival_s

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def total_s(self) -> float:
        """From arrival to the end."""
        return self.finished_s - self.arrival_s


@dataclass
class RequestOutput:
    """The result of one prompt; with n > 1 this is the first completion, and `others` are the rest.

    request_id: unique in the engine, one for each completion. prompt: the text, None if it came as tokens.
    prompt_token_ids: the prompt as the model saw it. num_preemptions: how often it lost its blocks and computed its
    tokens again. timings: None for a request that never reached the engine.
    token_ids holds every generated token, including a stop token; text leaves out special tokens (unless asked
    otherwise), a stop token, and a stop string with all text after it, and is empty without a tokenizer.
    stop_reason is the stop string or the token of stop_token_ids that ended it. num_cached_tokens counts prompt tokens
    found in the prefix cache. error says why a request with finish_reason "error" was refused, or why one with "abort"
    ended if its caller did not end it. is_fault: a fault of a plugin or of the engine ended it, and neither
    the request nor its caller. index counts the completions of a prompt.
    logprobs (one per token of token_ids) and prompt_logprobs (one per token of the prompt, None for the first) are None
    unless asked for.
    tags, priority, deadline_s (seconds after the arrival) are the request's own. refusal: for a refused request, the
    kind of refusal as one word: RequestError.reason.
    extensions: by the name of a step extension that the request used, its result for each token of token_ids, as plain
    data; None if none of its extensions has results.
    vector: of a request that was pooled, (F,) float32; it has no token_ids, and finish_reason "stop".
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    text: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    stop_reason: str | int | None = None
    timings: Timings | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    index: int = 0
    others: list[RequestOutput] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    deadline_s: float | None = None
    refusal: str | None = None
    vector: VectorArray | None = None
    is_fault: bool = False
    extensions: dict[str, list[Any]] | None = None

    def __repr__(self) -> str:
        """Short, for a notebook: the fields have the rest."""
        shown = {"text": self.text, "error": self.error, "num_others": len(self.others) or None}
        told = ", ".join(f"{name}={value!r}" for name, value in shown.items() if value)
        sizes = f"{len(self.prompt_token_ids)} prompt tokens, {len(self.token_ids)} tokens"
        vector = "" if self.vector is None else f", vector of {len(self.vector)}"
        return f"<RequestOutput {self.request_id}: {sizes}{vector}, {self.finish_reason.value}{told and f', {told}'}>"

    def copy(self) -> RequestOutput:
        """A copy with its own lists and vector, which may be changed without changing this output."""
        return replace(
            self,
            prompt_token_ids=list(self.prompt_token_ids),
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            others=[one.copy() for one in self.others],
            tags=dict(self.tags),
            vector=None if self.vector is None else self.vector.copy(),
            extensions=None if self.extensions is None else {name: list(v) for name, v in self.extensions.items()},
        )

    @property
    def completions(self) -> list[RequestOutput]:
        """All completions of the prompt, this one first."""
        return [self, *self.others]

    @property
    def score(self) -> float | None:
        """The number of a vector of length 1, as returned by LLM.score; None otherwise."""
        return None if self.vector is None or len(self.vector) != 1 else float(self.vector[0])

    @property
    def usage(self) -> Usage:
        """Tokens over all completions; the prompt counts once, and as cached as the first completion found it."""
        num_completion_tokens = sum(len(completion.token_ids) for completion in self.completions)
        return Usage(len(self.prompt_token_ids), self.num_cached_tokens, num_completion_tokens)


@dataclass
class Delta:
    """The tokens and text added to one completion since its last Delta.

    request_id is that of the output. prompt_index counts the prompts of the call, index the completions of a prompt.
    text is the new text, or all text so far if the caller asked for cumulative text: whole characters, without an end
    that may become a stop string. token_ids are the new tokens; text can lag behind them. logprobs, if they were asked
    for, and extensions are results for the new tokens, as in RequestOutput. output is the whole result, in the last
    Delta of a completion, and None before.
    """

    request_id: int
    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    output: RequestOutput | None = None
    logprobs: list[TokenLogprob] | None = None
    extensions: dict[str, list[Any]] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the completion ended; None while it goes on."""
        return None if self.output is None else self.output.finish_reason

    def joined(self, further: Delta, *, is_cumulative: bool = False) -> Delta:
        """Join the next Delta of the same completion to it. is_cumulative: a Delta's text is all text so far."""
        return replace(
            further,
            text=further.text if is_cumulative else self.text + further.text,
            token_ids=self.token_ids + further.token_ids,
            logprobs=None if self.logprobs is None or further.logprobs is None else self.logprobs + further.logprobs,
            extensions=joined_told(self.extensions, further.extensions),
        )


Told = dict[str, list[Any]]
"""By the name of a step extension, its results for some consecutive tokens: see RequestOutput.extensions."""


def behind(told: Told | None, num_tokens: int) -> Told | None:
    """The results for the tokens from number num_tokens on."""
    return None if told is None else {name: values[num_tokens:] for name, values in told.items()}


def joined_told(told: Told | None, further: Told | None) -> Told | None:
    """The results for some tokens followed by those for the next ones, in new lists."""
    if told is None or further is None:
        return told or further
    names = dict.fromkeys((*told, *further))
    return {name: [*told.get(name, ()), *further.get(name, ())] for name in names}


def merge_completions(completions: list[RequestOutput]) -> RequestOutput:
    """Make one output of the completions of a prompt, at least one, in any order: the first, with the rest as `others`.

    `others` are in the order of their index. The prompt's log-probabilities, which only the first request computed, are
    copied to each.
    """
    first, *others = sorted(completions, key=lambda output: output.index)
    first.others = others
    if (scores := first.prompt_logprobs) is not None:
        for one in others:
            one.prompt_logprobs = list(scores)
    return first
