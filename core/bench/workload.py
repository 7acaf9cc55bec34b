"""The load of a benchmark: requests as token ids, their arrival times, and their output lengths.

Drawn from a seed alone, so that every engine and every run gets the same load.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hookline.core.bench.slo import Slo
from hookline.core.config.schema import build
from hookline.core.errors import ConfigError, RequestError, shown
from hookline.core.request_options import LINE_KEYS, PLAIN, RequestOptions
from hookline.core.sampling_params import NEUTRAL, SamplingParams
from hookline.core.structured_outputs import StructuredOutputs
from hookline.core.util.ranges import bounded, check_ranges

DISTRIBUTIONS = ("uniform", "lognormal")
Z_90 = 1.6449
"""Standard deviations around the mean that hold 90 % of a normal distribution."""
NO_BOUNDS = Slo()
MAX_PROMPT_TOKENS = 2**24
"""Most tokens of a prompt; no checkpoint has more positions."""

BESIDE_TRACE = ("trace", "max_token_id", "temperature", "top_k", "top_p", "seed")
"""Fields of WorkloadConfig that have an effect beside `trace`."""


@dataclass(frozen=True)
class WorkloadClass:
    """A class of a load's requests, or of its conversations, with the options that they share."""

    share: float = bounded(1.0, above=0)
    """Its part of the requests in proportion to the other classes' shares: 4 beside 1 is four in five."""
    tags: dict[str, str] = field(default_factory=dict)
    """See RequestOptions, for the next three too."""
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str | None = None
    prompt_len: tuple[int, int] | None = None
    """None: as the workload says."""
    output_len: tuple[int, int] | None = None
    """None: as the workload says."""
    slo: Slo = field(default_factory=Slo)
    """Latency bounds of its requests; without any, the benchmark's slo."""

    def options(self) -> RequestOptions:
        """The options of its requests.

        Raises: RequestError if no request can say that.
        """
        return RequestOptions(**{key: getattr(self, key) for key in LINE_KEYS}).checked()


def workload_of(values: Mapping[str, Any]) -> WorkloadConfig:
    """The load that a mapping describes.

    Raises: ConfigError naming the key, the value and the allowed range.
    """
    for one in fields(WorkloadConfig):
        if isinstance(one.default, tuple) and values.get(one.name, one.default) is None:
            raise ConfigError(f"workload.{one.name} must have a value; it is None")
    workload: WorkloadConfig = build(WorkloadConfig, values, "workload")
    return workload


@dataclass(frozen=True)
class WorkloadConfig:
    """Lengths in tokens, times in seconds; a pair is a range with both ends included.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    num_prompts: int = bounded(8, 1)
    """Requests; with several turns, conversations."""
    prompt_len: tuple[int, int] = (16, 64)
    """Tokens of a prompt, without the shared prefix."""
    output_len: tuple[int, int] = (8, 16)
    """Tokens that a request asks for."""
    length_distribution: str = "uniform"
    """How lengths are drawn from their range: "uniform", or "lognormal" with 90 % of the draws inside and none out."""
    shared_prefix_len: int = bounded(0, 0, MAX_PROMPT_TOKENS)
    """Leading tokens that all prompts share, on top of prompt_len."""
    request_rate: float | None = bounded(None, above=0)
    """Requests that arrive per second, whatever the engine has finished by then; None: all at the start."""
    burstiness: float = bounded(1.0, above=0)
    """Shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, less comes in bursts."""
    turns: tuple[int, int] = (1, 1)
    """Turns of a conversation: each later prompt is the conversation so far and prompt_len new tokens."""
    think_s: tuple[float, float] = (0.0, 0.0)
    """Wait between an answer's end and the next turn."""
    classes: tuple[Any, ...] = ()
    """Classes of requests, drawn by their `share`. Each may set tags, priority, deadline_s, cache_salt, prompt_len,
    output_len, slo. Empty: all requests are alike. Kept as WorkloadClass."""
    trace: str | None = None
    """A .jsonl file of recorded requests in place of all that is drawn; core/bench/trace.py says what a line holds."""
    max_token_id: int = bounded(10000, 1)
    """Token ids are drawn from 0 to this; a smaller vocabulary lowers it."""
    temperature: float = 0.6
    """Temperature of all requests; 0 is greedy."""
    top_k: int = bounded(0, 0)
    """Draw from the k most likely tokens, for all requests; 0: from all. A checkpoint's own top_k is not used."""
    top_p: float = bounded(1.0, above=0, high=1)
    """Draw from the most likely tokens that together reach this probability; 1: from all. Not the checkpoint's."""
    json_schema: str | None = None
    """A JSON schema, as JSON text, that every completion follows; None leaves them free."""
    seed: int = 0
    """Seed of all that is drawn."""

    def __post_init__(self) -> None:
        check_ranges(WorkloadConfig, vars(self), "workload")
        for name in ("prompt_len", "output_len", "turns", "think_s"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # configurations bring lists
        for name in ("prompt_len", "output_len", "turns"):
            _check_lengths(f"workload.{name}", getattr(self, name))
        if self.length_distribution not in DISTRIBUTIONS:
            known = ", ".join(DISTRIBUTIONS)
            raise ConfigError(f"workload.length_distribution={self.length_distribution!r} is not one of {known}")
        self._check_times()
        classes = (_class(f"workload.classes[{place}]", one) for place, one in enumerate(self.classes))
        object.__setattr__(self, "classes", tuple(classes))
        self._check_trace()
        if self.json_schema is not None:
            try:
                StructuredOutputs(json=self.json_schema)
            except RequestError as error:
                raise ConfigError(f"workload.json_schema: {error}") from error

    def _check_times(self) -> None:
        low, high = self.think_s
        if not 0 <= low <= high < math.inf:
            raise ConfigError(f"workload.think_s=[{low}, {high}] must be two finite numbers, 0 <= first <= second")
        if high and self.turns == (1, 1):
            raise ConfigError(f"workload.think_s=[{low}, {high}] has no effect without workload.turns")
        if self.burstiness != 1 and self.request_rate is None:
            raise ConfigError(f"workload.burstiness={self.burstiness} has no effect without workload.request_rate")

    def _check_trace(self) -> None:
        if self.trace is None:
            return
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in BESIDE_TRACE and value != one.default:
                raise ConfigError(
                    f"workload.{one.name}={shown(value)} has no effect beside workload.trace={self.trace}, "
                    "which brings its own requests"
                )

    def params(self, max_tokens: int, structured: StructuredOutputs | None = None) -> SamplingParams:
        """The sampling parameters of a request for `max_tokens` tokens: the workload's, not a checkpoint's."""
        own = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        more = {"max_tokens": max_tokens, "ignore_eos": True, "structured_outputs": structured}
        return SamplingParams(**{**NEUTRAL, **own, **more})


def _check_lengths(key: str, pair: Sequence[int]) -> None:
    if len(pair) != 2 or not 1 <= pair[0] <= pair[1] <= MAX_PROMPT_TOKENS:
        limit = f" <= {MAX_PROMPT_TOKENS}" if len(pair) == 2 and max(pair) > MAX_PROMPT_TOKENS else ""
        raise ConfigError(f"{key}={shown(list(pair))} must be two whole numbers, 1 <= first <= second{limit}")


def _class(key: str, values: Any) -> WorkloadClass:
    if isinstance(values, WorkloadClass):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={shown(values)} must be a mapping of the fields of a class")
    one: WorkloadClass = build(WorkloadClass, values, key)
    for name in ("prompt_len", "output_len"):
        if getattr(one, name) is not None:
            _check_lengths(f"{key}.{name}", getattr(one, name))
    try:
        one.options()
    except RequestError as error:
        raise ConfigError(f"{key}: {error}") from error
    return one


@dataclass(frozen=True)
class LoadRequest:
    """A request. tokens: its prompt; of a later turn of a conversation, the tokens that the turn adds.

    arrival_s: seconds after the load's start; of a later turn, after the end of the turn before.
    follows: place in the load of the turn before, whose prompt and answer come first in the prompt.
    slo: the request's own bounds; None: the benchmark's.
    """

    tokens: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    follows: int | None = None
    options: RequestOptions = PLAIN
    slo: Slo = NO_BOUNDS


@dataclass(frozen=True)
class Load:
    """Requests in a fixed order; a later turn of a conversation stands behind the turn before."""

    requests: list[LoadRequest]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, without the tokens of earlier turns in later ones."""
        return sum(len(request.tokens) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens wanted of all requests."""
        return sum(request.params.max_tokens or 0 for request in self.requests)


@dataclass
class TokenSource:
    """Random token ids, other ones in each repetition, so that no prefix hit crosses over."""

    rng: random.Random
    max_token_id: int
    vocab_size: int
    repetition: int = 0

    def draw(self, count: int) -> list[int]:
        """As many token ids below the vocabulary's size."""
        bound, shift = min(self.max_token_id, self.vocab_size - 1) + 1, 7919 * self.repetition
        # What rng.randint draws, at a fifth of its time: a simulation draws longer than it simulates.
        draw_bits, num_bits, found = self.rng.getrandbits, bound.bit_length(), list[int]()
        while len(found) < count:
            found += [token for _ in range(count - len(found)) if (token := draw_bits(num_bits)) < bound]
        return [(token + shift) % self.vocab_size for token in found] if shift else found


def draw_load(workload: WorkloadConfig, vocab_size: int, repetition: int = 0) -> Load:
    """The load of a repetition: the same lengths and times each time and other token ids.

    A workload with a trace is read by `read_trace`.
    """
    assert workload.trace is None
    rng = random.Random(workload.seed)
    source = TokenSource(rng, workload.max_token_id, vocab_size, repetition)
    turns, arrivals_s, thinking_s = _draw_times(workload)
    classes = [one for one, count in zip(_draw_classes(workload), turns, strict=True) for _ in range(count)]
    options = {id(one): one.options() for one in classes}
    prompts = [source.draw(_draw_len(rng, workload, one.prompt_len or workload.prompt_len)) for one in classes]
    structured = None if workload.json_schema is None else StructuredOutputs(json=workload.json_schema)
    params = [
        workload.params(_draw_len(rng, workload, one.output_len or workload.output_len), structured) for one in classes
    ]
    shared = source.draw(workload.shared_prefix_len)
    requests: list[LoadRequest] = []
    for num_turns, arrival_s in zip(turns, arrivals_s, strict=True):
        for turn in range(num_turns):
            place = len(requests)
            tokens = prompts[place] if turn else [*shared, *prompts[place]]
            due_s, follows = (thinking_s[place], place - 1) if turn else (arrival_s, None)
            one = classes[place]
            requests.append(LoadRequest(tokens, params[place], due_s, follows, options[id(one)], one.slo))
    return Load(requests)


def _draw_classes(workload: WorkloadConfig) -> list[WorkloadClass]:
    """Of each conversation; a stream of its own, as for times."""
    if not workload.classes:
        return [WorkloadClass()] * workload.num_prompts
    shares = [one.share for one in workload.classes]
    return random.Random(f"classes {workload.seed}").choices(workload.classes, shares, k=workload.num_prompts)


def _draw_times(workload: WorkloadConfig) -> tuple[list[int], list[float], list[float]]:
    """Turns and arrival of each conversation, and the pause before each turn; a stream of their own, so that lengths
    and tokens are the same for every rate.
    """
    rng = random.Random(f"times {workload.seed}")
    turns = [rng.randint(*workload.turns) for _ in range(workload.num_prompts)]
    arrivals_s, now_s = [], 0.0
    for _ in turns:
        arrivals_s.append(now_s)
        if workload.request_rate is not None:
            shape = workload.burstiness
            now_s += rng.gammavariate(shape, 1 / (workload.request_rate * shape))
    return turns, arrivals_s, [rng.uniform(*workload.think_s) for _ in range(sum(turns))]


def _draw_len(rng: random.Random, workload: WorkloadConfig, bounds: tuple[int, int]) -> int:
    low, high = bounds
    if workload.length_distribution == "uniform" or low == high:
        return rng.randint(low, high)
    middle, spread = (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / 2
    return min(max(round(rng.lognormvariate(middle, spread / Z_90)), low), high)
